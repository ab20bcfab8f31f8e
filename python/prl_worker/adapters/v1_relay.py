"""A v1 environment whose rollouts are played at an environment server of the library (`verifiers.v1.serve`, 0.4).

Its protocol has no version: the library here must be the server's. It plays whatever task data it gets and lists none, so rows come from the task set loaded here."""

import asyncio
import contextlib
from types import ModuleType

import verifiers.v1 as vf
from pydantic import ValidationError
from verifiers.v1.serve.client import EnvClient

from prl_worker.adapters import v1_bridge
from prl_worker.adapters.base import LoadRequest, Outcome
from prl_worker.adapters.v1 import V1Environment, episode_error
from prl_worker.errors import DescribedError, WorkerError
from prl_worker.framing import jsonable
from prl_worker.model_calls import Run
from prl_worker.model_endpoint import OURS, Lease, ModelEndpoint, local_host_towards

START_SECONDS = 120.0  # until a server answers its first ping
PING_SECONDS = 5.0
MAX_MISSED = 3


class V1Relay(V1Environment):
    def __init__(self, request: LoadRequest, module: ModuleType) -> None:
        super().__init__(request, module)
        self._info.is_stateful = False
        self._address = request.relay
        self._endpoint = ModelEndpoint(request.calls, request.connection.max_frame)
        self._server: EnvClient | None = None
        self._playing: set[asyncio.Task] = set()
        self._watching: asyncio.Task | None = None

    async def open(self) -> None:
        await self._endpoint.open(await asyncio.to_thread(local_host_towards, self._address))
        self._server = EnvClient(self._address)
        try:
            await self._server.wait_for_server_startup(timeout=START_SECONDS)
        except TimeoutError:
            await self.close()
            raise WorkerError("infra", f"no environment server answers at {self._address} (of verifiers' v1 API, {START_SECONDS:.0f} s); {OURS}") from None
        self._watching = asyncio.get_running_loop().create_task(self._watch())

    async def _watch(self) -> None:
        """The library's client waits for ever for a server that has gone."""
        num_missed = 0
        while True:
            await asyncio.sleep(PING_SECONDS)
            num_missed = 0 if not self._playing or await self._server.health(timeout=PING_SECONDS) else num_missed + 1
            if num_missed >= MAX_MISSED:
                for task in list(self._playing):
                    task.cancel()

    async def run(self, run: Run) -> Outcome:
        data = run.data if run.data is not None else self._data(self._task(run))
        async with self._endpoint.lease(run) as lease:
            client = vf.EvalClientConfig(base_url=lease.base_url, api_key_var="PRL_NO_KEY")
            playing = asyncio.get_running_loop().create_task(
                self._server.run(client, run.model, vf.SamplingConfig.model_validate(run.sampling), data)
            )
            self._playing.add(playing)
            try:
                episode = await playing
            except asyncio.CancelledError:
                if asyncio.current_task().cancelling() == 0:  # by _watch
                    raise WorkerError("infra", f"the environment server {self._address} was lost") from None
                raise
            except (RuntimeError, ValidationError) as error:
                if lease.failure is not None:
                    raise lease.failure from error
                raise WorkerError("task", f"the environment server {self._address}: {error}", retryable=False) from error
            finally:
                self._playing.discard(playing)
            return self._outcome(run, lease, episode)

    def _outcome(self, run: Run, lease: Lease, episode) -> Outcome:
        seats = []
        for trace in episode.traces:
            if trace.id in lease.calls_of:
                session = lease.session_of(trace.id)
                seats.append(v1_bridge.Seat(run, trace, session, lease.calls_of[trace.id]))
            else:  # an agent that never asked
                seats.append(v1_bridge.Seat(run, trace, f"{run.session_id}/{len(lease.calls_of) + len(seats)}"))
        error = episode_error(episode.errors[-1]) if episode.errors and not episode.ok else None
        if not seats:
            raise DescribedError(error or episode_error(None))
        record = jsonable(episode.model_dump(mode="json")) if run.want_record else None
        return Outcome(samples=[self._sample(run, seat) for seat in seats], error=error, record=record)

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watching
        if self._server is not None:
            await self._server.close()
            self._server = None
        await self._endpoint.close()
        await super().close()
