"""`make setup`: makes .venv and puts the course, with all that its tests need, into it.

It installs the versions that were tested, which constraints.txt lists. With --oldest, for `make oldest`, it
makes .venv-oldest, with the lowest versions that pyproject.toml allows; with --newest, for `make newest`,
.venv-newest, with the newest that the package index has.
Standard library only, and plain enough for Python 3.6, so that an old Python can be told that it is old.
A stamp in .venv is written at the very end. While it stands and pyproject.toml asks for the same, nothing is
done. Where it is missing (the first run, a run that failed or was interrupted) everything is gone through,
and what is there already is kept: half of an interrupted run, and a torch that was put into .venv before.
"""
# ruff: noqa: UP021, UP032  (Python 3.6 has no `text=`)

import glob
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
OLDEST, NEWEST = "--oldest" in sys.argv[1:], "--newest" in sys.argv[1:]
NAME = ".venv-oldest" if OLDEST else ".venv-newest" if NEWEST else ".venv"
TESTED = os.path.join(ROOT, "constraints.txt")
VENV = os.path.join(ROOT, NAME)
PROGRAMS = os.path.join(VENV, "Scripts" if os.name == "nt" else "bin")
PYTHON = os.path.join(PROGRAMS, "python.exe" if os.name == "nt" else "python")
STAMP = os.path.join(VENV, "course-setup-done")
LOG = os.path.join(VENV, "course-setup.log")
DOWNLOADS = os.path.join(VENV, "course-setup-downloads")  # pip's temporary files: here we can clear them
CONSTRAINTS = os.path.join(DOWNLOADS, "constraints.txt")  # those of this set-up

# GB that stay in .venv, and GB of downloads beside them while pip installs
WITH_CUDA, WITHOUT_CUDA, TORCH_IS_THERE = (6.6, 2.8), (1.7, 0.5), (0.9, 0.3)

NO_VENV = re.compile(r"ensurepip\s+is\s+not\s+available|No module named '?(venv|ensurepip)")
DISK_FULL = re.compile(r"No space left on device|Disk quota exceeded|not enough space on the disk")
NO_NETWORK = re.compile(
    r"NewConnectionError|ConnectTimeout|ReadTimeout|Read timed out|Max retries exceeded|ProxyError|SSLError"
    r"|Connection (refused|reset|aborted)|Network is unreachable|Temporary failure in name resolution"
    r"|Name or service not known|getaddrinfo failed|nodename nor servname"
)

# JupyterLab's question about news, and its look for a newer version, answered for this .venv alone
LAB_SETTINGS = os.path.join(VENV, "share", "jupyter", "lab", "settings", "overrides.json")
NO_NEWS = {"@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": False}}
# nbgitpuller, for `make update`, brings a page by which a link could copy a stranger's files into the course
SERVER_SETTINGS = os.path.join(VENV, "etc", "jupyter", "jupyter_server_config.json")
NO_PULLING_BY_LINK = {"ServerApp": {"jpserver_extensions": {"nbgitpuller": False}}}


class Fault(Exception):
    """What went wrong and what to do, in one sentence."""


def set_up():
    if is_done():
        return
    wait_for_another_set_up()
    if is_done():
        return
    follow_a_move()
    check_the_version()
    pip_options = check_the_space()
    if not has_pip():
        make_venv()
    forget_half_installed()
    install(pip_options)
    check_the_torch_pair()
    write(LAB_SETTINGS, json.dumps(NO_NEWS, indent=2))
    write(SERVER_SETTINGS, json.dumps(NO_PULLING_BY_LINK, indent=2))
    write(STAMP, wanted())
    print(f"Set-up done: the course is in {NAME}.")


def keep_compiled():
    """The course's modules: where PYTHONDONTWRITEBYTECODE is set, each rank would compile what it imports."""
    folders = [os.path.join(ROOT, *each) for each in (["course_lib"], ["tests"], ["lessons", "scripts"])]
    there = list(filter(os.path.isdir, folders))
    if there:  # without a folder, compileall takes all that Python has
        subprocess.call([PYTHON, "-m", "compileall", "-qq", *there])


def wanted():
    """The stamp of a .venv that is as the files ask: its folder, and a digest of what is asked."""
    tables = re.findall(r"(?ms)^\[.*?(?=^\[|\Z)", read(os.path.join(ROOT, "pyproject.toml")))
    asked = [table for table in tables if re.match(r"\[(build-system|project|tool\.setuptools)\b", table)]
    asked = re.sub(r"(?m)\s*#.*$|\s+$", "", "".join(asked)) + read(os.path.abspath(__file__)) + tested()
    return "{}\n{}\n".format(ROOT, hashlib.sha256(asked.encode("utf-8")).hexdigest())


def stamp():
    try:
        return read(STAMP)
    except OSError:
        return ""


def is_done():
    """Whether nothing is left to do; of the newest nobody knows before pip has asked the index."""
    return not NEWEST and stamp() == wanted() and os.path.exists(PYTHON)


def wait_for_another_set_up():
    """Two set-ups at once would break .venv, so the second waits; the lock ends with its process."""
    if fcntl is None:
        return
    folder = os.open(ROOT, os.O_RDONLY)
    os.set_inheritable(folder, True)  # pip holds it too: it may outlive a set-up that was killed
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("Another set-up is at work in this folder: waiting for it.", flush=True)
        fcntl.flock(folder, fcntl.LOCK_EX)


def follow_a_move():
    """The programs in .venv name its folder: after a move or a copy, let them name the new one."""
    old = os.path.join((stamp().splitlines() or [ROOT])[0], NAME)
    if old == VENV:
        return
    old, new = os.fsencode(old), os.fsencode(VENV)
    for path in glob.glob(os.path.join(glob.escape(PROGRAMS), "*")):
        if os.path.isfile(path) and not os.path.islink(path) and os.path.getsize(path) < 1e6:
            with open(path, "rb+") as file:
                content = file.read()
                if b"\0" not in content and old in content:
                    file.seek(0)
                    file.write(content.replace(old, new))
                    file.truncate()


def check_the_version():
    project = read(os.path.join(ROOT, "pyproject.toml"))
    oldest = tuple(int(part) for part in re.search(r'requires-python = ">=(\d+)\.(\d+)"', project).groups())
    needed = "the course needs {}.{} or newer".format(*oldest)
    found = venv_version()
    if found is None and sys.version_info[:2] < oldest:
        this = ".".join(str(part) for part in sys.version_info[:3])
        raise Fault(f"this is Python {this} and {needed}: name one, as in `PYTHON=python3.12 make setup`.")
    if found is not None and found < oldest:
        raise Fault(
            f"{NAME} holds Python {found[0]}.{found[1]} and {needed}: remove the folder {NAME} and name"
            " a newer Python, as in `PYTHON=python3.12 make setup`."
        )


def venv_version():
    """The version of .venv's Python as (3, 12), or None where there is none that works."""
    run = in_venv("print(*sys.version_info[:2])")
    return tuple(int(part) for part in run.stdout.split()[-2:]) if run.returncode == 0 else None


def has_pip():
    return in_venv("import pip").returncode == 0


def in_venv(code):
    """Run code in .venv's Python, unless that is the machine's own, to which a half-made .venv may lead."""
    is_ours = f"import os, sys; os.path.samefile(sys.prefix, {VENV!r}) or sys.exit('not a venv'); "
    return output_of([PYTHON, "-c", is_ours + code])


def check_the_space():
    """Raise where the disk is too full; return the options that let pip do with what is free."""
    there = installed("torch")
    if there:
        staying, downloads = TORCH_IS_THERE
    else:
        staying, downloads = WITH_CUDA if sys.platform.startswith("linux") else WITHOUT_CUDA
        staying = max(staying - size_of(VENV) / 1e9, 0.5)
    free = shutil.disk_usage(ROOT).free / 1e9
    if free < staying + downloads:
        smaller = f", or put PyTorch's smaller CPU build into {NAME} first, as the README says"
        raise Fault(
            f"the disk is too full: making {NAME} takes about {staying + downloads:.1f} GB, of which"
            f" {staying:.1f} GB stay, and {free:.1f} GB are free: make room{'' if there else smaller}."
        )
    return [] if free > staying + 2 * downloads else ["--no-cache-dir"]


def size_of(folder):
    files = (os.path.join(top, name) for top, _, names in os.walk(folder) for name in names)
    return sum(os.lstat(path).st_size for path in files)


def installed(name):
    """The folders in .venv that say that a package is installed."""
    folders = [os.path.join(glob.escape(VENV), lib, "site-packages") for lib in ("lib/python3*", "Lib")]
    return [path for folder in folders for path in glob.glob(os.path.join(folder, name + "-*.dist-info"))]


def make_venv():
    """Make .venv, or give it the pip that it lacks; what is in it stays unless nothing else helps."""
    make = [sys.executable, "-m", "venv", VENV]
    attempts = [make, [*make, "--clear"]]
    if venv_version() is not None:
        attempts.insert(0, [PYTHON, "-m", "ensurepip"])
    for command in attempts:
        run = output_of(command)
        if run.returncode == 0 and has_pip():
            return
        check_for_full_disk(run.stdout)
        if "venv" in command and NO_VENV.search(run.stdout):
            named = re.search(r"apt install (\S+)", run.stdout)
            package = named.group(1) if named else "python{}.{}-venv".format(*sys.version_info[:2])
            raise Fault(
                "this Python cannot make virtual environments: on Debian and Ubuntu,"
                f" `sudo apt install {package}`, then run the same command again."
            )
    raise Fault(f"`{sys.executable} -m venv {NAME}` failed: {last_line(run.stdout)}")


def forget_half_installed():
    """pip takes a package that it was killed in for installed; INSTALLER and RECORD are written last."""
    shutil.rmtree(DOWNLOADS, ignore_errors=True)
    for package in installed("*"):
        if not all(os.path.exists(os.path.join(package, name)) for name in ("INSTALLER", "RECORD")):
            shutil.rmtree(package)


def install(options):
    if not installed("torch"):
        print(f"Making {NAME}: this downloads PyTorch and takes some minutes.", flush=True)
    if OLDEST:
        options = [*options, "--only-binary", ":all:"]  # what a learner would have to build is not promised
    if NEWEST:
        options = [*options, "--upgrade", "--upgrade-strategy", "eager"]
    lines = lowest_versions() if OLDEST else "" if NEWEST else without_another_torch(tested())
    try:
        told = pip_install(options, lines)
        for _ in range(lines.count("\n")):
            if told is None or OLDEST or NO_NETWORK.search(told + read(LOG)):
                break
            lines = without_what_is_in_the_way(lines)
            if lines is None:
                break
            told = pip_install(options, lines)
    finally:
        shutil.rmtree(DOWNLOADS, ignore_errors=True)
    if told is None:
        return
    check_for_full_disk(told)
    errors = re.findall(r"(?m)^\s*ERROR: (?!Exception:|ResolutionImpossible)(.*)$", told)
    error = errors[-1] if errors else last_line(told)
    error += " (all that pip said: {}/{})".format(NAME, os.path.basename(LOG))
    if NO_NETWORK.search(told + read(LOG)):
        raise Fault(f"pip could not reach the package index, is there a network? Its last line: {error}")
    if "No matching distribution" in error:
        version = "{}.{}".format(*venv_version())
        raise Fault(f"pip finds no package that fits Python {version} on this machine: {error}")
    raise Fault(f"pip failed: {error}")


def pip_install(options, lines):
    """Install the course within constraints; None where that went well, or else pip's complaints."""
    write(CONSTRAINTS, lines)
    write(LOG, "")
    pip = [PYTHON, "-m", "pip", "install", "--disable-pip-version-check", "--no-input", "--log", LOG]
    with subprocess.Popen(
        [*pip, *options, "--constraint", CONSTRAINTS, "-e", ".[lab,albert,test,mutants,site]"],
        cwd=ROOT,
        env=dict(os.environ, TMPDIR=DOWNLOADS, TEMP=DOWNLOADS, PIP_USER="0", PIP_REQUIRE_VIRTUALENV="1"),
        stderr=subprocess.PIPE,  # its progress is shown, its complaints become one sentence
        universal_newlines=True,
        errors="replace",
        close_fds=False,
    ) as process:
        told = process.stderr.read()
    return told if process.returncode else None


def tested():
    """The lines of constraints.txt, one version each; some for one platform or Python alone."""
    return read(TESTED) if not (OLDEST or NEWEST) and os.path.exists(TESTED) else ""


def name_of(line):
    """The package that a line of constraints is about, as pip spells it; "" for a comment."""
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]*", line).group()).lower()


def pinned(line):
    """Name and version of a line of constraints, for people."""
    return line.partition(";")[0].strip().replace("==", " ")


def without_another_torch(lines):
    """Constraints that keep a torch that is there and new enough, and what it was built with."""
    for path in installed("torch"):
        version = os.path.basename(path)[len("torch-") : -len(".dist-info")]
        if numbers(version) >= numbers(dict(bounds())["torch"]):
            if "torch==" + version.partition("+")[0] not in lines.splitlines():
                lines = without_torchs_own(lines)
            kept = [line for line in lines.splitlines() if name_of(line) != "torch"]
            return "\n".join([*kept, "torch==" + version, ""])
    return lines


def without_torchs_own(lines):
    """Constraints without the packages of which each torch wants versions of its own."""
    own = re.compile(r"torchvision$|triton$|cuda-|nvidia-(?!ml-py)")
    return "\n".join(line for line in lines.splitlines() if not own.match(name_of(line)))


def without_what_is_in_the_way(lines):
    """Constraints with other versions in place of those that pip cannot have; None where it named none.

    The index may have dropped a version, or somebody's own pip settings may exclude it: then the nearest one
    that the index has. A version that is there and does not fit the others is no longer asked for.
    """
    told = re.sub(r"(?m)^\d\S+ ", "", read(LOG))  # without the time in front of each line
    named = re.findall(r"(?m)^ +The user requested \(constraint\) ([\w.-]+)", told)
    named += re.findall(r"satisfies the requirement ([\w.-]+)", told)
    named += re.findall(r"(?m)^ +([\w.-]+) \S+ depends on ", told)
    in_the_way = [
        line for line in lines.splitlines() if "==" in line and name_of(line) in map(name_of, named)
    ]
    gone = {}
    for line in in_the_way:
        version = re.search(r"==([^\s;]+)", line).group(1)
        nearest = nearest_version(name_of(line), version)
        if nearest not in (None, version):
            gone[line] = line.replace("==" + version, "==" + nearest, 1)
            print(f"{pinned(line)} was tested, but the package index does not have it: {nearest} instead.")
    if not gone:
        for line in in_the_way:
            print(f"{pinned(line)} was tested, but does not fit here: another version instead.")
    if any(name_of(line) == "torch" for line in gone or in_the_way):
        lines = without_torchs_own(lines)
    kept = [gone.get(line, line) for line in lines.splitlines() if gone or line not in in_the_way]
    return "\n".join([*kept, ""]) if in_the_way else None


def nearest_version(name, version):
    """Of the versions that the index has and the course allows: this one, or the next older or newer one."""
    pip = [PYTHON, "-m", "pip", "install", "--dry-run", "--no-deps", "--no-user"]
    listed = re.search(r"\(from versions: ([^)]*)\)", output_of([*pip, name + "==0.0.0.dev0"]).stdout)
    there = listed.group(1).split(", ") if listed else []
    there = [each for each in there if re.match(r"[\d.]+(\.post\d+)?$", each)]  # and no pre-releases
    lowest = dict(bounds()).get(name, "0")
    there = [each for each in there if numbers(each) >= numbers(lowest)]
    if version in there or not there:
        return version if there else None
    older = [each for each in there if numbers(each) < numbers(version)]
    return max(older, key=numbers) if older else min(there, key=numbers)


def lowest_versions():
    """Lines that make pip take the lowest release of all that pyproject.toml names."""
    return "".join("{}=={}\n".format(*bound) for bound in bounds())


def bounds():
    """Each package that pyproject.toml names, with the lowest version that it allows."""
    return re.findall(r'(?m)^ +"([\w-]+)>=([\d.]+)', read(os.path.join(ROOT, "pyproject.toml")))


def numbers(version):
    return [int(part) for part in re.match(r"[\d.]*\d", version).group().split(".")]


def check_for_full_disk(told):
    if DISK_FULL.search(told):
        raise Fault("the disk is full: make room, then run the same command again and it goes on.")


def check_the_torch_pair():
    """torch and torchvision are built for each other; of two sources, torch imports and torchvision fails."""
    run = in_venv(
        "import torch, torchvision.ops; torchvision.ops.nms(torch.zeros(1, 4), torch.zeros(1), 0.5)"
    )
    if run.returncode == 0:
        return
    pair = installed("torch") + installed("torchvision")
    names = " and ".join(os.path.basename(path)[: -len(".dist-info")].replace("-", " ") for path in pair)
    raise Fault(
        f"{names} do not work together ({last_line(run.stdout)}): `{NAME}/bin/python -m pip uninstall -y"
        " torch torchvision`, then take both from one place, by `make setup` or as the README says."
    )


def output_of(command):
    """Run a command to its end, both streams in stdout; a program that is not there fails like any other."""
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    try:
        return subprocess.run(command, cwd=ROOT, universal_newlines=True, errors="replace", **both)
    except OSError as error:
        return subprocess.CompletedProcess(command, 127, stdout=str(error))


def last_line(text):
    return (text.strip().splitlines() or ["it said nothing"])[-1].strip()


def read(path):
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()


def write(path, text):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path + ".new", "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(path + ".new", path)


def main():
    try:
        set_up()
        keep_compiled()
    except Fault as fault:
        print(f"Set-up stopped: {fault}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"Set-up stopped: {error}; mend that, then run the same command again.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nSet-up interrupted: run the same command again and it goes on.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
