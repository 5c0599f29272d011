"""Learns scikit-learn's handwritten digits: real data, and no line about recovery but two.

    resilient-run --standalone --nproc-per-node 4 examples/digits.py
    python examples/digits.py                      # one rank, no agent: the same function

The data set comes with scikit-learn (1,797 images of 8 x 8 pixels). A fifth of it is never trained
on and measures the accuracy. The last line is a fingerprint of the final parameters: two runs with
the same arguments print the same one, whatever happened to their processes on the way.
"""

from __future__ import annotations

import argparse
import hashlib

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import resilient

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--epochs", type=int, default=60)
parser.add_argument("--evaluate-every", type=int, default=20, metavar="EPOCHS")
args = parser.parse_args()

images, labels = load_digits(return_X_y=True)
pixels = torch.tensor(images, dtype=torch.float32) / 16.0
classes = torch.tensor(labels)
is_test = torch.arange(len(classes)) % 5 == 0
train_set = TensorDataset(pixels[~is_test], classes[~is_test])
test_pixels, test_classes = pixels[is_test], classes[is_test]

result: dict[str, str] = {}


def build() -> nn.Module:
    """Initialised here, so that a rank that is entered again starts from a fresh module."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 10))


def accuracy(model: nn.Module) -> float:
    model.eval()
    with torch.no_grad():
        correct = (model(test_pixels).argmax(1) == test_classes).float().mean().item()
    model.train()
    return correct


@resilient.train
def main(job: resilient.Job) -> None:
    model = job.data_parallel(job.build(build))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = job.batches(train_set, global_batch_size=64, epochs=args.epochs)
    job.protect(model=model, optimizer=optimizer, batches=batches)
    evaluate_every = args.evaluate_every * len(batches) // args.epochs
    for batch in batches:
        for inputs, targets in batch:
            F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        if (job.step + 1) % evaluate_every == 0:
            with job.section("evaluate"):
                if job.rank == 0:
                    print(f"step {job.step:5d}  accuracy {accuracy(model):.4f}", flush=True)
    if job.rank == 0:
        fingerprint = hashlib.sha256()
        for name, parameter in sorted(model.named_parameters()):
            fingerprint.update(name.encode() + parameter.detach().numpy().tobytes())
        result["accuracy"] = f"{accuracy(model):.4f}"
        result["sha256"] = fingerprint.hexdigest()


if __name__ == "__main__":
    main()
    for name, value in result.items():
        print(name, value)
