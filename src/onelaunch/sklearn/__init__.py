"""scikit-learn estimators that train on onelaunch's engines: `MLPClassifier`, `MLPRegressor`, and the search `SweepCV`.

They have the parameters and attributes of scikit-learn's own classes of these names. `TableEncoder` prepares tables with text
for them. scikit-learn itself is the optional extra `onelaunch[sklearn]`.
"""

try:
    import sklearn as _sklearn  # noqa: F401
except ImportError as error:
    raise ImportError(f"onelaunch.sklearn needs scikit-learn ({error}): pip install 'onelaunch[sklearn]'") from None

from onelaunch.sklearn.classifier import MLPClassifier
from onelaunch.sklearn.regressor import MLPRegressor
from onelaunch.sklearn.search import SweepCV
from onelaunch.sklearn.table_encoder import TableEncoder

__all__ = ["MLPClassifier", "MLPRegressor", "SweepCV", "TableEncoder"]
