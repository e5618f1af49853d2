"""What the workers and Redis hold right now, asked of them directly."""

from dataclasses import dataclass

import grpc

from outrider import rpc
from outrider.client import AsyncClient
from outrider.pb.v1 import draft_pb2, draft_pb2_grpc, verify_pb2, verify_pb2_grpc
from outrider.session.redis import connect


@dataclass(frozen=True, slots=True)
class Holdings:
    """The sessions and KV blocks of one worker."""

    worker_id: str
    sessions: int
    total_blocks: int
    free_blocks: int

    @property
    def idle(self) -> bool:
        """Whether everything was given back."""
        return self.sessions == 0 and self.free_blocks == self.total_blocks


async def holdings(client: AsyncClient) -> list[Holdings]:
    """Of every worker that the coordinator knows and that still answers."""
    status = await client.status()
    held = []
    for worker in status.workers:
        try:
            async with rpc.open_channel(worker.address) as channel:
                held.append(await ask(worker.pool, channel))
        except grpc.aio.AioRpcError as error:
            # One that was killed stays in the registry for a few seconds.
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
    return held


async def ask(pool: str, channel: grpc.aio.Channel) -> Holdings:
    """Of the worker at the other end, which is of the pool `verify` or `draft`."""
    if pool == "verify":
        verify = verify_pb2_grpc.VerifyServiceStub(channel)
        held = await verify.GetWorkerState(verify_pb2.GetWorkerStateRequest())
        sessions = held.running_sessions + held.waiting_sessions
        return Holdings(held.worker_id, sessions, held.total_blocks, held.free_blocks)
    draft = draft_pb2_grpc.DraftServiceStub(channel)
    state = await draft.GetDraftWorkerState(draft_pb2.GetDraftWorkerStateRequest())
    return Holdings(state.worker_id, state.sessions, state.total_blocks, state.free_blocks)


async def running_records(redis_url: str) -> list[str]:
    """The session records in Redis that still say running."""
    running = []
    async with connect(redis_url) as redis:
        cursor: bytes | int = b"0"
        while True:
            cursor, keys = await redis.command("SCAN", cursor, "MATCH", "outrider:*:session")
            for key in keys:
                if await redis.command("HGET", key, "state") == b"running":
                    running.append(key.decode())
            if cursor in (b"0", 0):
                return running
