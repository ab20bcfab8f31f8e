"""A legacy environment whose rollouts are played at an environment server of the library (`ZMQEnvServer`, 0.1.14 to 0.3.1).

Neither lists tasks nor tells what it loaded, so rows and names come from the same environment loaded here; its arguments must be those of the server."""

import asyncio
import contextlib
from collections.abc import Iterator
from types import ModuleType

from prl_worker.adapters.base import LoadRequest, Outcome, new_sample
from prl_worker.adapters.legacy import LegacyEnvironment
from prl_worker.adapters.legacy_client import library
from prl_worker.errors import ConfigError, DescribedError, WorkerError, classify_name
from prl_worker.framing import jsonable
from prl_worker.model_calls import Run
from prl_worker.model_endpoint import OURS, Lease, ModelEndpoint, local_host_towards

START_SECONDS = 120.0  # until a server answers its first ping; its workers load the environment meanwhile


class LegacyRelay(LegacyEnvironment):
    def __init__(self, request: LoadRequest, module: ModuleType) -> None:
        super().__init__(request, module)
        if self._info.group_scoring:
            raise ConfigError(
                f"environment {request.env_id!r} scores whole groups, which an environment server plays in one request: play it in workers of ours"
            )
        if self._info.is_stateful:
            self._info.is_stateful = False
            self._warnings.append("the state of an environment at a server elsewhere is not part of checkpoints")
        self._address = request.relay
        self._endpoint = ModelEndpoint(request.calls, request.connection.max_frame)
        self._server = None

    async def open(self) -> None:
        await self._endpoint.open(await asyncio.to_thread(local_host_towards, self._address))
        # Lost requests are not sent again: their rollouts begin anew with others of the orchestrator.
        self._server = library("serve").ZMQEnvClient(address=self._address, startup_timeout=START_SECONDS, recovery_timeout=0)
        try:
            await self._server.wait_for_server_startup()
        except TimeoutError:
            await self.close()
            raise WorkerError("infra", f"no environment server answers at {self._address} (of verifiers' legacy API, {START_SECONDS:.0f} s); {OURS}") from None

    async def run(self, run: Run) -> Outcome:
        row = jsonable(self._input(run))
        row.setdefault("example_id", run.index)
        async with self._endpoint.lease(run) as lease:
            config = library("types").ClientConfig(api_base_url=lease.base_url, api_key_var="PRL_NO_KEY", max_retries=0)
            with _named_failures(self._address, lease):
                output = await self._server.run_rollout(
                    row, config, run.model, self._merged_sampling(run), max_retries=0, state_columns=[*run.columns, "trajectory"]
                )
            return Outcome(samples=[self._sample_of(run, lease, output)], record=jsonable(dict(output)) if run.want_record else None)

    def _sample_of(self, run: Run, lease: Lease, output: dict) -> dict:
        sample = new_sample(run, session_id=run.session_id)
        # A server whose worker died plays the rollout again without a word: what counts is what it tells of in the end.
        sample["calls"] = [lease.replies[reply] for reply in dict.fromkeys(_reply_ids(output)) if reply in lease.replies]
        sample["num_turns"] = len(sample["calls"])
        timing = {"model_s": round(run.model_seconds.get(run.session_id, 0.0), 6), **_seconds(output.get("timing") or {})}
        self._fill(sample, run, output, timing)
        if output.get("error") is not None:
            sample.update(ok=False, error=_described(output["error"]))
        else:
            self._take_scores(sample, output, [])
        return sample

    async def close(self) -> None:
        if self._server is not None:
            await self._server.close()
            self._server = None
        await self._endpoint.close()
        await super().close()


@contextlib.contextmanager
def _named_failures(address: str, lease: Lease) -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:
        raise WorkerError("infra", f"the environment server {address} was lost: {error}") from error
    except RuntimeError as error:
        # The server gives the text of the exception alone; what the model's side failed with is known here.
        if lease.failure is not None:
            raise lease.failure from error
        raise WorkerError("task", f"the environment server {address}: {error}", retryable=False) from error


def _reply_ids(output: dict) -> list[str]:
    steps = output.get("trajectory") or []
    return [reply.get("id") for step in steps if isinstance(reply := step.get("response"), dict)]


def _described(error: dict) -> dict:
    kind = classify_name(str(error.get("error") or ""), str(error.get("error_chain_str") or ""))
    return {
        "type": str(error.get("error") or "Error"),
        "message": str(error.get("message") or error.get("error_chain_str") or "")[:8192],
        "class": kind,
        "retryable": kind in ("provider", "infra", "empty"),
    }


def _seconds(timing: dict) -> dict:
    def duration(name: str) -> float:
        value = timing.get(name)
        value = value.get("duration") if isinstance(value, dict) else value
        return round(float(value), 6) if isinstance(value, (int, float)) else 0.0

    return {f"{name}_s": duration(name) for name in ("setup", "generation", "env", "scoring", "total")}
