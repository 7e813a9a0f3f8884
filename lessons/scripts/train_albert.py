"""Train ALBERT to fill in masked words, with DDP, on ranks that somebody else starts (lesson 16).

    python train_albert.py --output albert                                      alone, a group of one
    torchrun --standalone --nproc-per-node=2 train_albert.py --output albert    two ranks on this machine

It makes a small ALBERT and its tokenizer from English text that ships with Python, or goes on from --model,
a folder that it wrote or a name on the Hugging Face Hub (`--model albert/albert-base-v2 --lr 1e-4` needs a
network, and was not tried). `from_pretrained` loads --output on any device. Started again with the same
--output, also after SIGTERM, it goes on where it was. To train on something of your own, change `paragraphs`.
"""

import argparse
import os
import signal
import sys
import time
from pathlib import Path

os.environ |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_DISABLE_TELEMETRY": "1"}

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler

try:
    from transformers import AlbertConfig, AlbertForMaskedLM, AlbertTokenizer, DataCollatorForLanguageModeling
    from transformers.utils.logging import disable_progress_bar
except ImportError as error:
    missing = f"train_albert.py needs transformers: `make setup`, or `pip install transformers` ({error})"
    sys.exit(missing if os.environ.get("RANK", "0") == "0" else 1)  # one rank tells

try:  # the course's figures: track() and log() do nothing where nobody watches
    from course_lib import log, place, track
except ImportError:  # this file alone trains all the same

    def place():
        if not torch.cuda.is_available():
            return torch.device("cpu"), "gloo"
        local_rank = int(os.environ.get("LOCAL_RANK", 0))  # where each rank sees its own GPU alone: cuda:0
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device, "nccl"

    def track(batches, total=None):
        return batches

    log = dict  # it changes nothing

STATE = "training.pt"  # in --output, beside what from_pretrained loads: what a resume needs
SENTENCE = "It can [MASK] used."


def paragraphs():
    """The text to train on, a paragraph each: Python's language reference, as help() shows it."""
    from pydoc_data.topics import topics

    blocks = [block for name in sorted(topics) for block in topics[name].split("\n\n")]
    prose = [" ".join(b.split()) for b in blocks if not b.startswith(("   ", "+--", ">>>"))]  # no tables
    return [*dict.fromkeys(t for t in prose if len(t.split()) >= 8 and not {"::=", "***"} & set(t.split()))]


def pieces_of(texts, tokenizer, length):
    """Their tokens, in pieces of at most so many, each between [CLS] and [SEP]."""
    coded = tokenizer(texts, truncation=True, max_length=length, return_overflowing_tokens=True)
    return [{"input_ids": ids} for ids in coded["input_ids"]]


def begin(args, settings):
    """On rank 0: tokenizer, model, and the state to go on from, or None."""
    state, source = None, args.model
    if args.output and (args.output / STATE).exists():
        state = torch.load(args.output / STATE, map_location="cpu", weights_only=True)  # runs no code of it
        source = str(args.output)
        if state["settings"] != settings:
            raise ValueError(f"{source} is of another training run, with {state['settings']}")
    if source is None:
        texts = paragraphs()
        tokenizer = AlbertTokenizer().train_new_from_iterator(texts, vocab_size=1000, show_progress=False)
        small = dict(embedding_size=64, hidden_size=64, num_attention_heads=4, intermediate_size=128)
        small |= dict(num_hidden_layers=2, max_position_embeddings=args.length, initializer_range=0.05)
        return tokenizer, AlbertForMaskedLM(AlbertConfig(vocab_size=len(tokenizer), **small)), state
    folder = {"local_files_only": Path(source).is_dir()}  # then the network is not asked
    tokenizer = AlbertTokenizer.from_pretrained(source, **folder)
    # safetensors hold numbers alone; an older .bin would be a pickle, which may run code when it is loaded
    model = AlbertForMaskedLM.from_pretrained(source, use_safetensors=True, **folder)
    if args.length > (most := model.config.max_position_embeddings):
        raise ValueError(f"--length {args.length} is more than the {most} tokens that {source} takes")
    return tokenizer, model, state


def told_by_rank_0(args, settings):
    """Tokenizer, model and state, alike on all ranks: rank 0 looks, since another may find another file."""
    model, told = None, [None] * 4
    if dist.get_rank() == 0:
        try:
            told[0], model, told[2] = begin(args, settings)
            told[1] = model.config  # its weights come with DDP
        except Exception as error:
            told[3] = f"cannot begin: {type(error).__name__}: {(str(error).splitlines() or [''])[0]:.200}"
    dist.broadcast_object_list(told, src=0)  # by pickle, which is safe here: our own rank 0 has written it
    tokenizer, config, state, fault = told
    if fault:
        sys.exit(fault if dist.get_rank() == 0 else 1)
    return tokenizer, model or AlbertForMaskedLM(config), state


def optimizer_of(model, lr, decay=0.01):
    """AdamW; no weight decay for biases and norms, which are vectors, whatever their names are."""
    matrices = [each for each in model.parameters() if each.ndim > 1]
    vectors = [each for each in model.parameters() if each.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr)


def sum_of_losses(model, batch):
    """Of all masked tokens in a batch; its mean would be nan where there is none."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")


def masked(batch):
    return (batch["labels"] != -100).sum()  # the collator's label for "no question"


def batches_of(loader, epoch, done, seed, rank):
    """An epoch's batches, but for the first `done`; each rank's masks for each depend on these numbers alone.

    So a restart draws the masks (and what dropout leaves out) that would have been drawn without it.
    """
    found = iter(loader)  # without workers: it draws a batch's masks when it is asked for the batch
    for step in range(len(loader)):
        torch.manual_seed(hash((seed, epoch, step, rank)) % 2**63)  # of whole numbers: alike in all processes
        batch = next(found)
        if step >= done:
            yield batch


def evaluate(model, batches, device):
    """The mean loss of all masked tokens of all ranks, the same number on every rank."""
    sums = torch.zeros(2, dtype=torch.float64, device=device)  # of the losses, of the tokens
    model.eval()
    with torch.no_grad():
        for batch in batches[dist.get_rank() :: dist.get_world_size()]:
            sums += torch.stack([sum_of_losses(model, batch), masked(batch)])
    model.train()
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def linear(optimizer, steps):
    """Warm up in a tenth of the steps, then go down to 0 in a straight line, and no further."""
    rising = 1 + steps // 10
    falling = steps - rising + 1
    return LambdaLR(optimizer, lambda s: max(0, min((s + 1) / rising, (steps - s) / falling)))


@record  # when a rank raises, torchrun's report shows its traceback
def train(args):
    device, backend = place()
    # torchrun has said all that is needed. Nobody has started us? Then a group of one.
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(backend, device_id=device if backend == "nccl" else None, **alone)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    disable_progress_bar()
    torch.manual_seed(args.seed)
    settings = {k: v for k, v in vars(args).items() if k not in ("model", "output")} | {"ranks": world_size}
    tokenizer, model, state = told_by_rank_0(args, settings)
    samples = pieces_of(paragraphs(), tokenizer, args.length)
    how = {"seed": args.seed, "mask_replace_prob": 1, "random_replace_prob": 0}  # on all ranks; none is shown
    ask = DataCollatorForLanguageModeling(tokenizer, **how)
    held_out = [ask(samples[at : at + 320 : 10]).to(device) for at in range(0, len(samples), 320)]
    samples = [each for i, each in enumerate(samples) if i % 10]  # every tenth is held out
    collate = DataCollatorForLanguageModeling(tokenizer)  # draws new masks each time, from torch's generator
    sampler = DistributedSampler(samples, seed=args.seed)
    loader = DataLoader(samples, args.batch_size, sampler=sampler, collate_fn=collate)

    ddp = DDP(model.to(device).train(), device_ids=[device.index] if device.type == "cuda" else None)
    optimizer = optimizer_of(model, args.lr)
    steps = len(loader) * args.epochs  # of this rank, and so of the optimizer
    schedule = linear(optimizer, steps)
    step = state["step"] if state else 0
    if state:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        if rank == 0:
            print(f"{step} of {steps} steps were done already", flush=True)
    end = []  # not a threading.Event: its set() takes a lock, and a second signal in there waits for ever
    if args.output is not None:
        signal.signal(signal.SIGTERM, lambda *_: end.append(True))

    def save():
        """Rank 0 writes, the others wait."""
        if rank == 0 and args.output is not None:
            model.save_pretrained(part := args.output / "part")
            tokenizer.save_pretrained(part)
            kept = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "settings": settings}
            torch.save(kept | {"schedule": schedule.state_dict(), "step": step}, part / STATE)
            # First beside their targets, then renamed: a kill leaves the old file or the new one, never half.
            for path in sorted(part.iterdir()):  # the state comes last
                os.replace(path, args.output / path.name)
            part.rmdir()
        dist.barrier()

    for epoch in range(step // len(loader), args.epochs):
        sampler.set_epoch(epoch)
        done = step % len(loader)  # steps of this epoch that a start before this one has made
        batches = batches_of(loader, epoch, done, args.seed, rank)
        sums, started = torch.zeros(3, dtype=torch.float64, device=device), time.perf_counter()
        for batch in track(batches, len(loader) - done):
            batch = batch.to(device)
            # Before the backward: how many tokens are masked on all ranks? And has one been asked to end?
            tokens = masked(batch)
            of_all = torch.stack([tokens, tokens.new_tensor(len(end))])
            dist.all_reduce(of_all)
            if of_all[1]:  # all end, or none
                save()
                sys.exit(128 + signal.SIGTERM)  # not 0: the training is not done
            losses = sum_of_losses(ddp, batch)
            optimizer.zero_grad()
            # DDP divides by the number of ranks. So multiply by it, and divide by the tokens of all of them.
            (losses * world_size / of_all[0].clamp(min=1)).backward()
            torch.nn.utils.clip_grad_norm_(ddp.parameters(), max_norm=1.0)
            log(loss=losses.detach() / tokens.clamp(min=1), lr=schedule.get_last_lr()[0])
            optimizer.step()
            schedule.step()
            step += 1
            sums += torch.stack([losses.detach(), tokens, batch["attention_mask"].sum()])
        dist.all_reduce(sums)  # the loss of all masked tokens, not the mean of the ranks' means
        speed = sums[2].item() / (time.perf_counter() - started)
        log(held_out=(held := evaluate(model, held_out, device)))
        if rank == 0:
            words = f"epoch {epoch + 1}: loss {sums[0] / sums[1]:.3f}, held-out loss {held:.3f}"
            print(f"{words}, {speed:,.0f} tokens/s on {world_size} rank{'s' * (world_size > 1)}", flush=True)
        save()
    if rank == 0:  # the likeliest tokens for the gap in a sentence
        inputs = tokenizer(SENTENCE, return_tensors="pt").to(device)
        gap = model.eval()(**inputs).logits[inputs["input_ids"] == tokenizer.mask_token_id][0]
        shares, tokens = (each.tolist() for each in gap.softmax(-1).topk(5))
        best = zip(tokenizer.convert_ids_to_tokens(tokens), shares, strict=True)
        print(SENTENCE, *(f" {token} {share:.0%}" for token, share in best))
    del ddp  # before torch 2.14 a DDP that outlives its group may hang (gloo)
    dist.destroy_process_group()


def parse_arguments():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--model", metavar="NAME", help="go on from this: a folder, or a name on the Hugging Face Hub")
    add("--output", type=Path, metavar="FOLDER", help="go on from it where it is there; write it")
    add("--epochs", type=int, default=100, help="times through the text")
    add("--batch-size", type=int, default=16, help="pieces of text that go forward at once, on each rank")
    add("--length", type=int, default=32, help="tokens of a piece of text, at most")
    add("--lr", type=float, default=3e-3, help="AdamW's learning rate, at the end of the warm-up")
    add("--seed", type=int, default=0, help="of the first weights, the order and each rank's masks")
    args = parser.parse_args()
    for name, least in {"epochs": 1, "batch-size": 1, "length": 8}.items():
        if (given := getattr(args, name.replace("-", "_"))) < least:
            parser.error(f"argument --{name}: it is a whole number from {least} on, not {given}")
    if not 0 < args.lr < float("inf"):
        parser.error(f"argument --lr: it is a number above 0, not {args.lr:g}")
    if args.output is not None:
        args.output.mkdir(parents=True, exist_ok=True)
    return args


if __name__ == "__main__":
    train(parse_arguments())
