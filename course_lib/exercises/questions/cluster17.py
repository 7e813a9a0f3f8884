"""A cluster of stand-ins for question 17.1: `srun`, `scontrol`, … that note what a job file asks of them."""

# One program under all of their names, run by Python without its site: it starts in milliseconds.
STAND_IN = r"""
import json, os, subprocess, sys

name, words = os.path.basename(sys.argv[0]), sys.argv[1:]
cluster = json.loads(os.environ["STAND_IN"])
nodes, addresses = cluster["names"], cluster["addresses"]
here = os.environ.get("SLURMD_NODENAME", nodes[0])
FLAGS = "label unbuffered overlap exact kill-on-bad-exit exclusive no-kill verbose quiet pty".split()


def note(what, words):
    keys = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    told = {key: os.environ[key] for key in keys if key in os.environ}
    line = json.dumps({"what": what, "words": words, "node": here, "told": told}) + "\n"
    with open(os.environ["STAND_IN_NOTES"], "a") as file:
        file.write(line)


def srun(words):
    short = {"N": "nodes", "n": "ntasks", "w": "nodelist"}
    options = {}
    while words and words[0].startswith("-"):
        word = words.pop(0)
        if word.startswith("--"):
            option, given, value = word[2:].partition("=")
            if not given and option not in FLAGS and words:
                value = words.pop(0)
        else:
            option, value = short.get(word[1], word[1]), word[2:]
            if not value and word[1] not in "luKvQOksE" and words:
                value = words.pop(0)
        options[option] = value
    on = list(nodes)
    if "nodelist" in options:
        on = [each for each in nodes if each in options["nodelist"].split(",")] or on
    if options.get("nodes", "").isdigit():
        on = on[: int(options["nodes"])]
    each = options.get("ntasks-per-node") or os.environ.get("SLURM_NTASKS_PER_NODE", "")
    if options.get("ntasks", "").isdigit():
        count = int(options["ntasks"])
    elif each.isdigit():
        count = int(each) * len(on)
    else:
        count = max(len(on), int(os.environ["SLURM_NTASKS"]) if len(on) == len(nodes) else 1)
    if count > 64:
        sys.exit("srun: more than 64 tasks")
    status, task = 0, 0
    for place, node in enumerate(on):
        share = count // len(on) + (place < count % len(on))
        for local in range(share):
            environment = dict(
                os.environ,
                SLURM_PROCID=str(task),
                SLURM_NODEID=str(place),
                SLURM_LOCALID=str(local),
                SLURM_NTASKS=str(count),
                SLURM_NPROCS=str(count),
                SLURM_NNODES=str(len(on)),
                SLURMD_NODENAME=node,
                SLURM_LAUNCH_NODE_IPADDR=addresses[0],
            )
            status = max(status, subprocess.call(words, env=environment))
            task += 1
    sys.exit(status)


def scontrol(words):
    words = [word for word in words if not word.startswith("-")]
    if words[:2] in (["show", "hostnames"], ["show", "hostname"]):
        asked = words[2] if len(words) > 2 else cluster["list"]
        print("\n".join(nodes if asked == cluster["list"] else asked.split(",")))
    elif words[:2] in (["show", "node"], ["show", "nodes"]):
        for node in words[2:] or nodes:
            address = addresses[nodes.index(node)]
            print("NodeName=%s Arch=x86_64\n   NodeAddr=%s NodeHostName=%s" % (node, address, node))
    elif words[:2] == ["show", "job"]:
        job = os.environ["SLURM_JOB_ID"]
        print("JobId=%s\n   NodeList=%s\n   BatchHost=%s" % (job, cluster["list"], nodes[0]))
    else:
        sys.exit("scontrol: this stand-in knows show hostnames, show node and show job")


if name == "srun":
    srun(words)
elif name == "scontrol":
    scontrol(words)
elif name == "hostname":
    address = any(word.lstrip("-").startswith(("i", "I", "all-ip")) for word in words)
    print(addresses[nodes.index(here)] if address else here)
elif name == "torchrun":
    note("torchrun", words)
elif name.startswith("python"):
    while words and words[0] in ("-u", "-B", "-O"):
        words.pop(0)
    if words[:1] == ["-c"]:
        sys.exit(subprocess.call([sys.executable, *words]))
    if words[:2] in (["-m", "torch.distributed.run"], ["-m", "torch.distributed.launch"]):
        note("torchrun", words[2:])
    else:
        note("python", words)
else:
    sys.exit(name + ": not on this cluster")
"""
