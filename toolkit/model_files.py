"""stub"""


def load_model_config(path, *, models_dir): ...
