"""A model of PyTorch that stays as it is, trained on our attention.

    python examples/torch_backend.py

Runs on a GPU if there is one, in bfloat16."""

try:
    import torch
except ImportError as error:
    raise SystemExit(f"{error} (pip install torch)") from None
from flash_attn_minimal.torch import activate


def train():
    place = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    x, target = torch.randn(2, 4, 100, 64, generator=torch.manual_seed(0)).to(*place)
    layer = torch.nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True).to(*place)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    for _ in range(20):
        optimizer.zero_grad()
        (layer(x) - target).square().mean().backward()
        optimizer.step()
    return (layer(x) - target).square().mean().item()


before = train()
with activate():
    assert abs(train() - before) < 0.01
print(f"loss {before:.6f} with PyTorch's attention, and the same with ours")
