"""The peers that are timed beside this library. Each runs in its own processes, because it may hang.

    torch_allgather, torch_alltoall   torch.distributed.tensor.experimental.context_parallel around
                                      scaled_dot_product_attention, keys moved by one all-gather or from rank to rank
    ring                              our flash_attn_func on each rank, keys sent from rank to rank by isend and irecv,
                                      results merged in float32 by merge; forward only

A process group of torch.distributed moves the keys: NCCL between GPUs, gloo on the CPU.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from flash_attn_minimal import flash_attn_func, merge

from ..bench.machine import BenchError, TorchCpu, first_line
from ..bench.suite import rounded
from .crew import Meeting, Spec
from .rank import Here, Order, Work, about, join_process_group, race

LABELS = {
    "torch_allgather": "PyTorch, all-gather",
    "torch_alltoall": "PyTorch, all-to-all",
    "ring": "isend/irecv ring",
}
PEERS = tuple(LABELS)
ROOM = 3.0  # factor on the tolerance that this library has
BACKENDS = ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION")  # PyTorch's, the fastest first


class Refused(BenchError):
    """A peer does not serve a case; the text says why."""


class Peer:
    """A peer on one case: the launch that race() times, and the answer in this library's layout."""

    note = ""  # how it was made to run
    alone: Callable | None = None  # the same attention on one device

    def __init__(self, here: Here, order: Order):
        self.here, self.work = here, Work(here, order.case)
        self.results: tuple = ()

    def launch(self) -> Any:
        raise NotImplementedError

    def poison(self) -> None:
        """Does nothing: the results are new arrays each time."""

    def check_again(self) -> dict[str, Any]:
        return self.work.judge(self.results, ROOM)

    def close(self) -> None:
        pass


class Ring(Peer):
    """Keys are passed from rank to rank. While one set is on its way, the rank works on another."""

    def __init__(self, here: Here, order: Order):
        case = order.case
        if case.of != "forward" or len(case.lengths) > 1 or case.window or case.tokens % (2 * here.size):
            raise Refused(f"this ring does the forward pass of one sequence of a multiple of {2 * here.size} tokens")
        super().__init__(here, order)
        import torch.distributed as dist

        self.dist, self.torch = dist, here.machine.torch
        work, self.causal, self.threads = self.work, case.causal, here.threads
        self.q, self.k, self.v = (work.mine(x)[None] for x in (work.q, work.k, work.v))

    def launch(self):
        """Zigzag layout: of 2 P chunks, rank r has chunks r and 2 P - 1 - r. Under a causal mask all queries see the
        first chunk of an earlier rank's keys; only the second chunk of queries sees a later rank's keys, and all of
        them."""
        rank, size, half = self.here.rank, self.here.size, self.q.shape[1] // 2
        keys = [self.k, self.v]
        for step in range(size):
            arriving = self._send(keys) if step + 1 < size else None
            source = (rank - step) % size
            if step == 0:
                out, lse = self._attend(self.q, *keys, self.causal)
                out = out.float()
            elif not self.causal:
                out, lse = self._add(out, lse, self._attend(self.q, *keys, False))
            elif source < rank:
                out, lse = self._add(out, lse, self._attend(self.q, *(x[:, :half] for x in keys), False))
            else:
                late = out[:, half:], lse[:, :, half:].contiguous()
                found = self._add(*late, self._attend(self.q[:, half:], *keys, False))
                out[:, half:], lse[:, :, half:] = found
            if arriving:
                keys = arriving()
        self.results = (out[0].to(self.q.dtype),)

    def _attend(self, q, k, v, causal: bool):
        return flash_attn_func(q, k, v, causal=causal, return_lse=True, num_threads=self.threads)

    @staticmethod
    def _add(out, lse, more):
        return merge(out, lse, more[0].float(), more[1])

    def _send(self, keys) -> Callable[[], list]:
        """Starts to send keys to the next rank, and to receive those of the previous rank."""
        rank, size, dist = self.here.rank, self.here.size, self.dist
        room = [self.torch.empty_like(x) for x in keys]
        moves = [dist.P2POp(dist.isend, x, (rank + 1) % size) for x in keys]
        moves += [dist.P2POp(dist.irecv, x, (rank - 1) % size) for x in room]
        handles = dist.batch_isend_irecv(moves)

        def arrived() -> list:
            for handle in handles:
                handle.wait()
            return room

        return arrived


class TorchContextParallel(Peer):
    """scaled_dot_product_attention on (batch, heads, rows, headdim), inside context_parallel."""

    def __init__(self, here: Here, order: Order, rotate: str):
        case = order.case
        if case.of == "decode" or len(case.lengths) > 1 or case.window:
            raise Refused("context_parallel has no packed sequences, no window and no cache")
        super().__init__(here, order)
        try:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.tensor import experimental
            from torch.distributed.tensor.experimental._attention import _cp_options, set_rotate_method
        except ImportError as error:
            raise Refused(f"this PyTorch has no context_parallel: {first_line(error)}") from None
        self.torch = here.machine.torch
        self._stack = contextlib.ExitStack()
        self._plain = self.torch.nn.functional.scaled_dot_product_attention
        set_rotate_method(rotate)
        _cp_options.enable_load_balance = case.causal  # it does not balance a full mask
        mesh = init_device_mesh(here.machine.device, (here.size,))
        grouped = case.nheads != case.nheads_k
        tried: dict[str, list[str]] = {}  # reasons, and what failed for each
        for backend in BACKENDS:
            for repeated in (False, True) if grouped else (False,):
                try:
                    self._open(experimental.context_parallel, mesh, backend, grouped, repeated)
                    self.launch()
                    here.machine.synchronize()
                    text = ""
                except Exception as error:  # any error of this prototype is a reason to try the next way
                    text = first_line(error)
                texts = [text for text in here.gather(text) if text]
                if not texts:
                    found = self.check_again()
                    if not found.get("wrong"):
                        heads = "key heads repeated beforehand" if repeated else "enable_gqa" if grouped else ""
                        self.note = ", ".join(filter(None, (backend, heads)))
                        return
                    texts = [found["why"]]
                tried.setdefault(texts[0], []).append(backend + " with repeated key heads" * repeated)
                self._stack.close()
        raise Refused("; ".join(f"{', '.join(names)}: {reason}" for reason, names in tried.items()))

    def _open(self, context_parallel, mesh, backend: str, grouped: bool, repeated: bool) -> None:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        work, case, torch = self.work, self.work.case, self.torch
        self._options = {"is_causal": case.causal} | ({"enable_gqa": True} if grouped and not repeated else {})
        group = case.nheads // case.nheads_k if repeated else 1
        whole = [x[None].transpose(1, 2).contiguous() for x in (work.q, work.k, work.v)]
        whole[1:] = [x.repeat_interleave(group, 1) for x in whole[1:]]
        mine = [x.clone() for x in whole]
        rows = torch.arange(case.tokens, device=whole[0].device).reshape(1, 1, -1, 1)
        buffers = [*mine, rows]
        if case.of == "backward":
            dout = work.dout[None].transpose(1, 2).contiguous()
            buffers.append(dout)
        self._stack = stack = contextlib.ExitStack()
        stack.enter_context(sdpa_kernel(getattr(SDPBackend, backend)))
        stack.enter_context(
            context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * len(buffers), no_restore_buffers=set(buffers))
        )
        work.rows = rows.flatten().cpu().numpy()  # context_parallel has cut the buffers
        self._whole, self._mine, self._group = whole, mine, group
        self._graph = self._graph_alone = None
        if case.of == "backward":
            self._dout = dout
            self._graph = self._leaves(mine, torch.nn.functional.scaled_dot_product_attention)

    def _leaves(self, arrays, function):
        leaves = [x.detach().requires_grad_() for x in arrays]
        return leaves, function(*leaves, **self._options)

    def _gradients(self, graph, dout):
        leaves, out = graph
        return self.torch.autograd.grad(out, leaves, dout, retain_graph=True)

    def launch(self):
        if self._graph is None:
            out = self.torch.nn.functional.scaled_dot_product_attention(*self._mine, **self._options)
            self.results = (out[0].transpose(0, 1),)
            return
        dq, *rest = self._gradients(self._graph, self._dout)
        if self._group > 1:
            rest = [x.unflatten(1, (-1, self._group)).float().sum(2).to(x.dtype) for x in rest]
        self.results = tuple(x[0].transpose(0, 1) for x in (dq, *rest))

    def alone(self):
        if self._graph is None:
            return self._plain(*self._whole, **self._options)
        if self._graph_alone is None:
            self._graph_alone = self._leaves(self._whole, self._plain)
            self._dout_alone = self.work.dout[None].transpose(1, 2).contiguous()
        return self._gradients(self._graph_alone, self._dout_alone)

    def close(self) -> None:
        self._graph = self._graph_alone = None
        self._stack.close()


class Torch(TorchCpu):
    """PyTorch on the CPU, as rank.Host is NumPy."""

    def enter(self) -> None:
        pass

    def take(self, x, rows, axis=0):
        return x.index_select(axis, self.torch.as_tensor(rows))


class Peers:
    """A rank of one peer, as serve() needs it."""

    def __init__(self, spec: Spec, here: Here):
        self.name, self.here = spec.kind, here
        self.about = about(here)

    def measure(self, order: Order) -> list[dict[str, Any]]:
        here, row = self.here, order.case.row()
        here.machine.enter()
        try:
            if self.name == "ring":
                peer: Peer = Ring(here, order)
            else:
                peer = TorchContextParallel(here, order, self.name.removeprefix("torch_"))
        except Refused as refused:
            return [row | {"error": str(refused)}]
        try:
            peer.launch()
            here.machine.synchronize()
            row |= peer.check_again()
            if not row.get("wrong"):
                race(here, order.protocol, peer.alone, [(row, peer)])
            if peer.note:
                row["note"] = peer.note
        finally:
            peer.close()
        del peer
        here.machine.release()
        return [rounded(row)]


@contextlib.contextmanager
def open_peers(spec: Spec, rank: int, meeting: Meeting) -> Iterator[Peers]:
    """Opens a process group of torch.distributed, and gives the peer of this rank."""
    try:
        import torch
        import torch.distributed as dist
    except ImportError:
        raise BenchError("PyTorch is not installed") from None
    warnings.simplefilter("ignore")
    here = Here(spec, rank, meeting, on_host=Torch)
    if here.machine.device == "cpu":
        torch.set_num_threads(spec.threads)
    join_process_group(spec, rank)
    try:
        yield Peers(spec, here)
    finally:
        dist.destroy_process_group()
