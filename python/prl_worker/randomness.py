"""Generators of random numbers that a template's imports made without a seed: in every process that is forked they must differ."""

import contextlib
import random
import sys
import weakref


class Fresh:
    """Notes such generators while `noted()`; `renew()` gives each a seed of the system's. Generators that were made with a seed stay as they are, as do
    the global ones of `random` and numpy, which a worker seeds itself."""

    def __init__(self) -> None:
        self._python: weakref.WeakSet[random.Random] = weakref.WeakSet()
        self._numpy: list = []

    @contextlib.contextmanager
    def noted(self):
        real = random.Random.seed

        def seed(generator, a=None, version=2):
            real(generator, a, version)
            # A later call with a seed takes the note back.
            (self._python.add if a is None else self._python.discard)(generator)

        random.Random.seed = seed
        numpy = sys.modules.get("numpy.random")
        make = getattr(numpy, "default_rng", None)
        if make is not None:

            def default_rng(seed=None):
                generator = make(seed)
                if seed is None:
                    self._numpy.append(generator)
                return generator

            numpy.default_rng = default_rng
        try:
            yield
        finally:
            random.Random.seed = real
            if make is not None:
                numpy.default_rng = make

    def renew(self) -> None:
        for generator in list(self._python):
            generator.seed()
        for generator in self._numpy:
            bits = generator.bit_generator
            bits.state = type(bits)().state
