from arriero.train.optim.optimizer import Optimizer, named_parameters

__all__ = ["Optimizer", "named_parameters"]
