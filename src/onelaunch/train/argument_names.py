"""How the arguments of other libraries are called in `fit`, `predict` and `sweep`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar

from onelaunch.argument_names import advise_by

P = ParamSpec("P")
T = TypeVar("T")

ELSEWHERE = {  # arguments of Keras, Lightning, scikit-learn and PyTorch: how to say it here
    "validation_split": "validation=0.1",
    "validation_fraction": "validation=0.1",
    "validation_data": "validation=(x, y)",
    "eval_set": "validation=(x, y)",
    "val_dataloaders": "validation=(x, y)",
    "max_epochs": "epochs=",
    "max_iter": "epochs=",
    "n_epochs": "epochs=",
    "num_epochs": "epochs=",
    "nb_epoch": "epochs=",
    "max_steps": "steps=",
    "learning_rate": "lr=",
    "learning_rate_init": "lr=",
    "lr_scheduler": "schedule=",
    "scheduler": "schedule=",
    "alpha": "weight_decay=",
    "l2": "weight_decay=",
    "criterion": "loss=",
    "loss_fn": "loss=",
    "gradient_clip_val": "clip_norm=",
    "clipnorm": "clip_norm=",
    "max_norm": "clip_norm=",
    "max_grad_norm": "clip_norm=",
    "grad_clip": "clip_norm=",
    "n_iter_no_change": "early_stopping=5",
    "patience": "early_stopping=5, or early_stopping=ol.EarlyStopping(patience=5, …)",
    "restore_best_weights": "early_stopping=ol.EarlyStopping(…, restore_best=True)",
    "min_delta": "early_stopping=ol.EarlyStopping(…, min_delta=…)",
    "tol": "early_stopping=ol.EarlyStopping(…, min_delta=…)",
    "random_state": "seed=",
    "verbose": "progress=True or False",
    "verbosity": "progress=True or False",
    "progress_bar": "progress=True or False",
    "shuffle": "seed=: rows are shuffled in every epoch, by the seed",
    "device": "model.to(device): fit trains on the model's device",
    "accelerator": "model.to(device): fit trains on the model's device",
    "dtype": "precision='fp32', 'tf32', 'bf16' or 'fp16'",
    "amp": "precision='bf16'",
    "ckpt_path": "checkpoint=path and resume=True",
    "resume_from": "checkpoint=path and resume=True",
    "dataloader": "x=: pass the DataLoader as x",
    "train_dataloaders": "x=: pass the DataLoader as x",
    "pos_weight": "class_weight={0: 1.0, 1: 5.0}",
    "weights": "sample_weight= or class_weight=",
    "weight": "sample_weight= or class_weight=",
    "logger": "callbacks=[ol.CsvLogger(path)]",
}


def advise(advice: Mapping[str, str] = ELSEWHERE) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a function of level 3 so that an unknown keyword argument is answered with its name here."""
    return advise_by(advice)
