"""Losses and filters of echo in Python, as trainer and orchestrator ask for them. Needs no package; what autograd does is tested where torch is installed."""

import importlib.util
import math
import pathlib
import struct
import sys
import tempfile
import unittest

from peer import PYTHON_DIR

sys.path.insert(0, str(PYTHON_DIR))
from prl_worker import echo, losses
from prl_worker.errors import ConfigError

FUNCTIONS = """
import math
from prl_worker.losses import LossOutputs

def reinforce(inputs, scale=1.0):
    members = [i for i, is_member in enumerate(inputs.loss_mask) if is_member]
    loss = -scale * sum(inputs.advantages[i] * inputs.trainer_logprobs[i] for i in members)
    gradient = [-scale * inputs.advantages[i] if inputs.loss_mask[i] else 0.0 for i in range(len(inputs.loss_mask))]
    return loss, {"members": len(members), "weights": inputs.loss_weights is not None, "nan": math.nan}, gradient

def as_table(inputs):
    return {"loss": 1.0, "gradient": [0.0] * len(inputs.advantages)}

def as_object(inputs):
    return LossOutputs(2.0, {"a": 1}, [0.5] * len(inputs.advantages))

def infinite(inputs):
    return math.inf, {}, [math.nan] * len(inputs.advantages)

def without_gradient(inputs):
    return 1.0, {}

def short(inputs):
    return 1.0, {}, [0.0]

def nothing(inputs):
    return None

def word(inputs):
    return 1.0, {"a": "b"}, [0.0] * len(inputs.advantages)

def torch_grpo(inputs, clip=8.0):
    ratio = (inputs.trainer_logprobs - inputs.inference_logprobs).exp()
    token = -ratio.clamp(max=clip) * inputs.advantages
    return LossOutputs(token[inputs.loss_mask].sum(), {"ratio": ratio[inputs.loss_mask]})

def detached(inputs):
    return inputs.trainer_logprobs.detach().sum(), {}

def all_but(rollout, token):
    return [[one != token for one in branch["token_ids"]] for branch in rollout["branches"]]

def half(rollout):
    return [[True, True]]

def long(rollout):
    return [[True] * 3, [True]]

constant = 3
"""


def floats(*numbers):
    return struct.pack(f"<{len(numbers)}f", *numbers).hex()


def doubles(text):
    data = bytes.fromhex(text)
    return list(struct.unpack(f"<{len(data) // 8}d", data))


SEQUENCE = {
    "trainer_logprobs": floats(0, -1, -2, -3),
    "inference_logprobs": floats(0, -1.5, -2, -2.5),
    "advantages": floats(0, 1, -1, 0.5),
    "loss_mask": bytes([0, 1, 0, 1]).hex(),
}


class Losses(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        pathlib.Path(cls.folder.name, "prl_test_losses.py").write_text(FUNCTIONS)
        sys.path.insert(0, cls.folder.name)
        cls.addClassCleanup(cls.folder.cleanup)
        cls.addClassCleanup(sys.path.remove, cls.folder.name)

    def evaluate(self, name, sequences=(SEQUENCE,), **kwargs):
        return losses.evaluate(f"prl_test_losses.{name}", list(sequences), **kwargs)

    def test_each_sequence_gets_its_loss(self):
        if importlib.util.find_spec("torch"):
            self.skipTest("inputs are tensors here")
        first, second = self.evaluate("reinforce", [SEQUENCE, {**SEQUENCE, "loss_weights": floats(1, 1, 1, 1), "loss_mask": bytes([0, 1, 1, 1]).hex()}], scale=2.0)
        self.assertEqual(doubles(first["loss"]), [-2.0 * (1 * -1 + 0.5 * -3)])
        self.assertEqual(doubles(first["gradient"]), [0, -2, 0, -1])
        self.assertEqual(first["metrics"], {"members": 2.0, "weights": 0.0})
        self.assertEqual(second["metrics"], {"members": 3.0, "weights": 1.0})
        self.assertEqual(doubles(second["gradient"]), [0, -2, 2, -1])

    def test_forms_of_an_answer(self):
        self.assertEqual(doubles(self.evaluate("as_table")[0]["gradient"]), [0, 0, 0, 0])
        self.assertEqual(doubles(self.evaluate("as_object")[0]["gradient"]), [0.5] * 4)
        self.assertEqual(self.evaluate("as_object", []), [])

    def test_what_is_not_finite_reaches_the_trainer(self):
        (answer,) = self.evaluate("infinite")
        self.assertEqual(doubles(answer["loss"]), [math.inf])
        self.assertTrue(all(math.isnan(number) for number in doubles(answer["gradient"])))

    def test_mistakes_are_named(self):
        for name, said in (("without_gradient", "no gradient"), ("short", "1 gradients for 4 tokens"), ("nothing", "NoneType"), ("word", "metric 'a'"),
                           ("constant", "wanted a function"), ("absent", "absent")):
            with self.subTest(name), self.assertRaisesRegex(ConfigError, f"prl_test_losses.{name}.*{said}"):
                self.evaluate(name)
        with self.assertRaisesRegex(ConfigError, "no_such_module"):
            losses.evaluate("no_such_module.loss", [])

    def test_filters_of_echo(self):
        rollouts = [{"branches": [{"token_ids": [1, 2]}, {"token_ids": [3]}]}]
        self.assertEqual(echo.masks("prl_test_losses.all_but", rollouts, token=2), [[[True, False], [True]]])
        for name, said in (("half", "1 lists for 2 branches"), ("long", "3 booleans for the 2 tokens of branch 0")):
            with self.subTest(name), self.assertRaisesRegex(ConfigError, said):
                echo.masks(f"prl_test_losses.{name}", rollouts)

    @unittest.skipUnless(importlib.util.find_spec("torch"), "torch is not installed")
    def test_autograd(self):
        (answer,) = self.evaluate("torch_grpo", clip=1.2)
        ratios = [math.exp(0.5), math.exp(-0.5)]
        self.assertAlmostEqual(doubles(answer["loss"])[0], -1.2 - 0.5 * ratios[1], places=6)
        for found, wanted in zip(doubles(answer["gradient"]), [0, 0, 0, -0.5 * ratios[1]]):
            self.assertAlmostEqual(found, wanted, places=6)
        self.assertAlmostEqual(answer["metrics"]["ratio"], sum(ratios) / 2, places=6)
        with self.assertRaisesRegex(ConfigError, "does not depend on trainer_logprobs"):
            self.evaluate("detached")


if __name__ == "__main__":
    unittest.main()
