"""`onelaunch bench zoo`: models that nobody has tuned for, drawn by a rule, against the best compiled step of PyTorch."""
