"""Many processes: the trainers built with MPI=1, started by mpirun on this machine.

One process is the measure: a rank more changes the order in which micro-batches' gradients are added and nothing
else. What such an order is worth, the single process shows itself: with other --batch it adds in other orders.
"""
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from tests.check import Skip, case, finish, skip  # noqa: E402

PLAIN, MPI, EMULATED = "./train_rdattnres_cpu", "build/train_rdattnres_cpu_mpi", "build/train_emulated_mpi"
if not shutil.which("mpirun") or not os.path.exists(MPI):
    skip("many processes", "no MPI on this machine (libopenmpi-dev, openmpi-bin)")
    finish()

scratch = tempfile.TemporaryDirectory(prefix="rdattnres-ranks-")
HERE = scratch.name
ENVIRONMENT = dict(os.environ, OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1", OMP_NUM_THREADS="1",
                   OMP_WAIT_POLICY="passive")
# 65,232 numbers a family, cut into chunks of 16,384: with three ranks the last one has no share at all.
MODEL = ("--layers 3 --width 48 --heads 3 --ffn 40 --block-size 4 --context 37 --vocab 257 --lr 0.01 --min-lr-ratio 1"
         " --sample-tokens 0 --val-tokens 370 --keep 0 --log-every 1 --total-batch 444 --train {0}/train.bin --val {0}/val.bin"
         .format(HERE).split())
STEPS = 20


def write_shard(name, tokens):
    with open(f"{HERE}/{name}", "wb") as file:
        file.write(struct.pack("<256i", 20240520, 1, len(tokens), *[0] * 253))
        file.write(struct.pack(f"<{len(tokens)}H", *tokens))


def noise(n, seed):  # each token hints at the next
    tokens = []
    for i in range(n):
        seed = (seed * 6364136223846793005 + 1442695040888963407) % 2**64
        tokens.append((i * 7 + (seed >> 33) % 5) % 131)
    return tokens


def start(program, ranks, out, *flags, more=(), environment={}):
    """ranks 0: without mpirun. more: further programs of the same job, as mpirun takes them."""
    given = {flag for flag in flags if flag.startswith("--")}
    model = [word for i in range(0, len(MODEL), 2) if MODEL[i] not in given for word in MODEL[i:i + 2]]
    command = [program, *([] if "--resume" in given else model), "--out", f"{HERE}/{out}", *flags]
    if ranks:
        command = ["mpirun", "--oversubscribe", "--bind-to", "none", "-np", str(ranks), *command, *more]
    return subprocess.Popen(command, env=dict(ENVIRONMENT, **environment), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                            start_new_session=True)


def train(program, ranks, out, *flags, status=0, **more):
    job = start(program, ranks, out, *([] if "--batch" in flags else ["--batch", "1"]), *flags, **more)
    text, _ = job.communicate(timeout=600)
    assert job.returncode == status, f"exit status {job.returncode}, expected {status}: {text[-2000:]}"
    return text


def events(out, kind):
    with open(f"{HERE}/{out}/log.jsonl") as log:
        return [event for event in map(json.loads, log) if event["event"] == kind]


def losses(out):
    return [(event["step"], event["loss"], event["norm"]) for event in events(out, "step")]


def apart(a, b):  # largest difference of two runs' losses
    assert [x[0] for x in a] == [x[0] for x in b] == list(range(1, STEPS + 1)), "a step is missing"
    return max(abs(x[1] - y[1]) for x, y in zip(a, b))


def rank_pids(job):
    pids = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/stat") as stat, open(f"/proc/{pid}/environ") as environ:
                rank = re.search(r"OMPI_COMM_WORLD_RANK=(\d+)", environ.read())
                if rank and int(stat.read().rsplit(")", 1)[1].split()[1]) == job.pid:
                    pids[int(rank[1])] = int(pid)
        except OSError:
            pass
    return pids


def wait_for(job, what):  # a line with these words
    for line in job.stdout:
        if what in line:
            return
    raise AssertionError(f"no line with '{what}'; exit status {job.wait()}")


write_shard("train.bin", noise(40000, 1))
write_shard("val.bin", noise(2000, 2))
single, bound = [], 0

with case("1 to 4 ranks train as one process does, to what an order of sums is worth"):
    train(PLAIN, 0, "one", "--steps", str(STEPS), "--checkpoint-every", "8")
    single = losses("one")
    for batch in "2", "3", "4", "6":
        train(PLAIN, 0, f"batch{batch}", "--steps", str(STEPS), "--batch", batch)
        bound = max(bound, 4 * apart(single, losses(f"batch{batch}")))
    found = []
    for n in range(1, 5):
        text = train(MPI, n, f"ranks{n}", "--steps", str(STEPS))
        assert text.count(f"step {STEPS}/{STEPS}") == text.count("done   ") == 1, text
        found.append(apart(single, losses(f"ranks{n}")))
    print(f"  losses differ by {found}, at most {bound:.1e} expected")
    assert found[0] == 0 and max(found) <= bound < 1e-3

with case("the same number of ranks gives the same bits"):
    for n in 3, 4:
        train(MPI, n, f"again{n}", "--steps", str(STEPS))
        assert losses(f"again{n}") == losses(f"ranks{n}")

with case("validation, routes and answers: the same numbers for any number of ranks"):
    for n in range(1, 5):
        train(MPI, n, f"look{n}", "--steps", "0", "--init-from", f"{HERE}/one", "--batch", "2", "--total-batch", "888")
        for kind in "val", "routes":
            assert events(f"look{n}", kind) == events("look1", kind) != [], kind
    for n in 1, 3:
        job = subprocess.run(["mpirun", "--oversubscribe", "--bind-to", "none", "-np", str(n), MPI, "--steps", "0",
                              "--context", "64", "--batch", "4", "--val-tokens", "3200", "--sample-tokens", "0",
                              "--out", f"{HERE}/stories{n}"], env=ENVIRONMENT, capture_output=True, text=True)
        assert job.returncode == 0, job.stderr
    assert events("stories1", "val") == events("stories3", "val")
    assert [e["split"] for e in events("stories1", "val")] == ["val", "answers", "answers looking back"]

with case("two hosts, each with a network of its own, are two ranks like any other"):
    if os.geteuid() != 0 or not shutil.which("ip") or subprocess.run(["ip", "netns", "add", "rdattnres-a"]).returncode:
        raise Skip("needs root, ip (iproute2), and a kernel that lets it make network namespaces")
    try:
        subprocess.run("""set -e
            ip netns add rdattnres-b
            ip link add end-a netns rdattnres-a type veth peer name end-b netns rdattnres-b
            ip -n rdattnres-a address add 10.77.0.1/24 dev end-a; ip -n rdattnres-b address add 10.77.0.2/24 dev end-b
            for h in a b; do ip -n rdattnres-$h link set lo up; ip -n rdattnres-$h link set end-$h up; done""",
                       shell=True, check=True)
        with open(f"{HERE}/enter", "w") as file:  # enter HOST COMMAND..., in place of ssh
            file.write('#!/bin/sh\ncase $1 in *.1) host=a;; *.2) host=b;; esac; shift\n'
                       'exec ip netns exec rdattnres-$host unshare --uts sh -c "hostname $host; $*"\n')
        os.chmod(f"{HERE}/enter", 0o755)
        options = "--host 10.77.0.1,10.77.0.2 --mca btl_tcp_if_include 10.77.0.0/24 --mca oob_tcp_if_include 10.77.0.0/24"
        command = " ".join([MPI, *MODEL, "--batch", "1", "--steps", str(STEPS), "--out", f"{HERE}/hosts"])
        job = subprocess.run([f"{HERE}/enter", "10.77.0.1", "mpirun", "-np", "2", "--mca", "plm_rsh_agent",
                              f"{HERE}/enter", options, "sh", "-c", f"'hostname; exec {command}'"], env=ENVIRONMENT,
                             capture_output=True, text=True)
        assert job.returncode == 0 and {"a", "b"} <= set(job.stdout.split()), job.stdout + job.stderr
        assert losses("hosts") == losses("ranks2")
    finally:
        subprocess.run("ip netns del rdattnres-a; ip netns del rdattnres-b", shell=True)

with case("a run goes on with another number of ranks: 4, 1, 3"):
    train(MPI, 4, "moves", "--steps", str(STEPS), "--checkpoint-every", "8")
    shutil.copytree(f"{HERE}/moves", f"{HERE}/stays")
    for folder in "moves", "stays":
        os.remove(f"{HERE}/{folder}/ckpt_{STEPS:08}.safetensors")
        os.remove(f"{HERE}/{folder}/ckpt_{16:08}.safetensors")
    train(MPI, 4, "stays", "--resume", f"{HERE}/stays")
    assert losses("stays") == losses("ranks4"), "four ranks that go on are not those that never stopped"
    train(PLAIN, 0, "moves", "--resume", f"{HERE}/moves", "--steps", "14")
    train(MPI, 3, "moves", "--resume", f"{HERE}/moves", "--steps", str(STEPS))
    print(f"  losses differ by {apart(single, losses('moves')):.1e}, at most {bound:.1e} expected")
    assert apart(single, losses("moves")) <= bound

with case("four ranks keep a quarter of the moments each"):
    measured, claimed = {}, {}
    large = ["--layers", "2", "--width", "512", "--heads", "8", "--ffn", "2048", "--context", "16", "--val-tokens", "16",
             "--total-batch", "64", "--steps", "2", "--block-size", "2"]
    ask = "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True); " \
          "print('peak', resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    for n in 1, 4:
        model = [w for i in range(0, len(MODEL), 2) if MODEL[i] not in large for w in MODEL[i:i + 2]]
        text = subprocess.run(["mpirun", "--oversubscribe", "--bind-to", "none", "-np", str(n), sys.executable, "-c", ask,
                               MPI, *model, *large, "--batch", "1", "--out", f"{HERE}/large{n}"], env=ENVIRONMENT,
                              capture_output=True, text=True, check=True).stdout
        measured[n] = [int(kib) / 1024 for kib in re.findall(r"peak (\d+)", text)]
        claimed[n] = float(re.search(r"AdamW moments +([\d.]+) MiB", text)[1])
        assert len(measured[n]) == n, text
    saved, expected = measured[1][0] - max(measured[4]), claimed[1] - claimed[4]
    print(f"  peak MiB {measured}, moments {claimed}: {saved:.1f} saved, {expected:.1f} expected")
    assert abs(claimed[4] / claimed[1] - 0.25) < 0.01 and abs(saved / expected - 1) < 0.25

with case("two and four emulated cards train as one does"):
    if not os.path.exists(EMULATED):
        raise Skip("no emulator on this machine: it is written for x86-64")
    short = ["--steps", "3", "--total-batch", "148", "--val-tokens", "37", "--dtype"]
    for dtype in "fp32", "bf16":
        train("build/train_emulated", 0, f"card1{dtype}", *short, dtype)
        expected = losses(f"card1{dtype}")
        if dtype == "fp32":  # what an order of sums is worth
            train("build/train_emulated", 0, "card_batch", *short, dtype, "--batch", "2")
            limit = 4 * max(abs(a[1] - b[1]) for a, b in zip(expected, losses("card_batch")))
        else:  # what rounding is worth: a parameter's last digit decides to which side its copy is rounded
            limit = max(abs(a[1] - b[1]) for a, b in zip(expected, losses("card1fp32")))
        for n in 2, 4:
            train(EMULATED, n, f"card{n}{dtype}", *short, dtype, environment={"EMU_CARDS": "4"})
            found = max(abs(a[1] - b[1]) for a, b in zip(expected, losses(f"card{n}{dtype}")))
            print(f"  {dtype}, {n} cards: losses differ by {found:.1e}, at most {limit:.1e} expected")
            assert found <= limit
    text = train(EMULATED, 2, "crowded", *short, dtype, status=1)
    assert re.search("^error: ranks 0 and 1 would share the GPU", text, re.M) and text.count("error: ") == 1, text
    assert not os.path.exists(f"{HERE}/crowded")

with case("each rank killed in turn, 20 times: mpirun's status, and the run goes on from its last checkpoint"):
    kept = 0
    for kill in range(20):
        where = ["--resume", f"{HERE}/killed"] if kill else ["--steps", "400", "--checkpoint-every", "2"]
        job = start(MPI, 4, "killed", "--batch", "1", *where)
        wait_for(job, "saved  ")
        time.sleep(0.011 * (kill // 4))
        os.kill(rank_pids(job)[kill % 4], signal.SIGKILL)
        job.communicate(timeout=600)
        assert job.returncode == 137, f"exit status {job.returncode}"
        train(PLAIN, 0, "killed", "--resume", f"{HERE}/killed", "--steps", "0", "--dry-run")
        newest = max(name for name in os.listdir(f"{HERE}/killed") if re.fullmatch(r"ckpt_\d+\.safetensors", name))
        assert int(newest[5:13]) > kept, "the run did not go on"
        kept = int(newest[5:13])
    train(MPI, 4, "never_killed", "--steps", "400", "--checkpoint-every", "2", "--keep", "1")
    both = list(zip(losses("never_killed"), losses("killed")))
    assert len(both) >= kept and all(a == b for a, b in both)

with case("a signal to any rank, or to mpirun: all save once, after one step, with status 0"):
    for who, number in [(0, signal.SIGTERM), (2, signal.SIGINT), (3, signal.SIGUSR1), (None, signal.SIGUSR1)]:
        job = start(MPI, 4, f"stop{who}", "--batch", "1", "--steps", "100000")
        wait_for(job, "step      3/")
        os.kill(job.pid if who is None else rank_pids(job)[who], number)
        text, _ = job.communicate(timeout=600)
        assert job.returncode == 0 and text.count("saved  ") == text.count("stopped at step") == 1, text
        assert sum(name.startswith("ckpt_") for name in os.listdir(f"{HERE}/stop{who}")) == 1

with case("trouble during a run: one line, one status"):
    text = train(MPI, 4, "wild", "--steps", "20", "--lr", "100", "--clip", "0", "--weight-decay", "100", status=1)
    assert len(re.findall("^error: step .* first bad number in ", text, re.M)) == text.count("error: ") == 1, text
    shutil.copy(f"{HERE}/train.bin", f"{HERE}/cut.bin")
    job = start(MPI, 4, "cut", "--batch", "1", "--steps", "100000", "--train", f"{HERE}/cut.bin")
    wait_for(job, "step      3/")
    os.truncate(f"{HERE}/cut.bin", 60000)
    text, _ = job.communicate(timeout=600)
    assert job.returncode == 1 and len(re.findall("^error: .*cut short", text, re.M)) == text.count("error: ") == 1, text
    train(PLAIN, 0, "cut", "--resume", f"{HERE}/cut", "--steps", "0", "--train", f"{HERE}/cut.bin", status=1)
    assert text.count("saved  ") == 1 and os.listdir(f"{HERE}/cut") != [], "nothing was saved"

with case("the page's table of predictions is what scaling_model.py prints"):
    table = subprocess.run([sys.executable, "dev/bench/scaling_model.py"], capture_output=True, text=True, check=True).stdout
    with open("dev/doc/ranks.md") as page:
        assert table in page.read()

with case("what does not fit: one line from one rank, nothing written"):
    def refused(ranks, words, *flags, more=()):
        text = train(MPI, ranks, "refused", *flags, status=2, more=more)
        assert re.search(words, text) and text.count("error: ") == 1, text
        assert not os.path.exists(f"{HERE}/refused")

    refused(4, r"^error: --total-batch: got 370, .* batch \* context \* 4 ranks = 148", "--total-batch", "370")
    refused(3, r"^error: --sped: no such flag", "--sped", "5")
    other = [":", "-np", "1", MPI, *MODEL, "--out", f"{HERE}/refused", "--batch", "1", "--steps", "7"]
    refused(2, "^error: rank 2 has --steps 7, rank 0 --steps 6", "--steps", "6", more=other)
    shutil.copy(MPI, f"{HERE}/other_build")
    with open(f"{HERE}/other_build", "ab") as program:
        program.write(b"\n")
    other[3] = f"{HERE}/other_build"
    refused(2, "^error: rank 2 has program .*, rank 0 program ", "--steps", "7", more=other)

finish()
