"""The library's own environment over the package reasoning-gym."""

import verifiers as vf


def load_environment(gym: str = "leg_counting", num_train_examples: int = 100, num_eval_examples: int = 20, seed: int = 0):
    return vf.ReasoningGymEnv(gym=gym, num_train_examples=num_train_examples, num_eval_examples=num_eval_examples, seed=seed)
