"""Runs a policy of MinAtar on a Cortex-M4, emulated by QEMU, and compares its Q-values with NumPy's.

    apt-get install gcc-arm-none-eabi libnewlib-arm-none-eabi qemu-system-arm
    python benchmark/microcontroller.py

Flash and RAM are those of the policy alone, by arm-none-eabi-size. QEMU counts instructions, not cycles.
"""

import dataclasses
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import tyro

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import export_policy  # noqa: E402
import play_policy  # noqa: E402

FLAGS = "-mcpu=cortex-m4 -mthumb -mfloat-abi=hard -mfpu=fpv4-sp-d16 -std=gnu99 -O3 -ffunction-sections -fdata-sections"
QEMU = "qemu-system-arm -M mps2-an386 -nographic -monitor none -serial none -semihosting -icount shift=0 -kernel"

ALONE = """
#include "policy.h"
void policy(const uint8_t *observation, float *q_values) { policy_q_values(observation, q_values); }
"""

# Without C's own start and printf: it starts where the vector table says and talks to QEMU by semihosting, a breakpoint
# that the debugger, here QEMU, takes as a call. Q-values leave it as the eight hexadecimal digits of their bits.
PROGRAM = """
#include <string.h>

#include "policy.h"

static const uint8_t observations[][%d] = {%s};

static void call(int operation, const void *argument) {
  register int r0 __asm__("r0") = operation;
  register const void *r1 __asm__("r1") = argument;
  __asm__ volatile("bkpt 0xab" : "+r"(r0) : "r"(r1) : "memory");
}

static void print_hex(uint32_t bits) {
  char text[10];
  for (int i = 0; i < 8; i++) text[i] = "0123456789abcdef"[bits >> (28 - 4 * i) & 15];
  text[8] = ' ', text[9] = 0;
  call(4, text);
}

__attribute__((noinline)) static void run(void) {
  volatile uint32_t *const clock = (volatile uint32_t *)0xE000E010;
  clock[1] = 0xFFFFFF, clock[2] = 0, clock[0] = 5; /* counts down from here */
  for (unsigned i = 0; i < sizeof observations / sizeof *observations; i++) {
    float q_values[%d];
    const uint32_t before = clock[2];
    policy_q_values(observations[i], q_values);
    const uint32_t after = clock[2];
    print_hex((before - after) & 0xFFFFFF);
    for (unsigned k = 0; k < sizeof q_values / 4; k++) {
      uint32_t bits;
      memcpy(&bits, q_values + k, 4);
      print_hex(bits);
    }
    call(4, "\\n");
  }
  call(0x18, (const void *)0x20026); /* the end */
}

void start(void) {
  *(volatile uint32_t *)0xE000ED88 |= 0xF00000; /* switches the floating-point unit on */
  __asm__ volatile("dsb\\n isb");
  run();
}

__attribute__((section(".vectors"), used)) static const struct { uint32_t stack; void (*start)(void); } vectors = {
  0x20400000, start
};
"""

LINKER_SCRIPT = """
MEMORY { FLASH (rx) : ORIGIN = 0, LENGTH = 4M  RAM (rwx) : ORIGIN = 0x20000000, LENGTH = 4M }
SECTIONS {
  .text : { KEEP(*(.vectors)) *(.text*) *(.rodata*) } > FLASH
  .data : { *(.data*) *(.bss*) *(COMMON) } > RAM
}
"""

INSTRUCTIONS_PER_TICK = 40  # of the board's clock of 25 MHz; with `-icount shift=0` an instruction takes 1 ns


@dataclasses.dataclass(frozen=True)
class Args:
    policy: Path = ROOT / "policies/minatar_breakout.npz"  # an agent of MinAtar
    n_positions: int = 100  # positions of its game on which it is compared, at least 1


def real_positions(path: Path, about: dict, network: dict, n_positions: int) -> np.ndarray:
    """Observations of the games that the policy plays, of their first 100 steps."""
    args = play_policy.Args(path)
    env, layers = play_policy.make_env(args, about, network), play_policy.make_layers(network)
    rng, inputs = np.random.default_rng(0), []
    while len(inputs) < 5 * n_positions:
        inputs += play_policy.play_episode(args, env, layers, rng, int(rng.integers(2**30)), None)[2]
    return np.concatenate(inputs)[rng.choice(len(inputs), n_positions, replace=False)]


def prune(network: dict, sparsity: float) -> dict:
    """The same network as if it had never been pruned, then pruned by magnitude in its largest layer.

    `erk` leaves the others nearly dense, too: they have less than a hundredth of the weights.
    """
    params = play_policy.fill_zeros(network["params"])
    name = max(params, key=lambda name: params[name]["kernel"].size)
    kernel, n_weights = params[name]["kernel"], play_policy.count_weights(network)[1]
    order = np.argsort(np.abs(kernel), axis=None)
    kernel.ravel()[order[: round(sparsity * n_weights)]] = 0  # a view: `fill_zeros` has made a new array
    return network | {"params": params}


def write_header(path: Path, about: dict, network: dict) -> None:
    layers = export_policy.planar_layers(network)
    path.write_text(export_policy.header_text(export_policy.Args(path, c=path), about, network, layers))


def measure(folder: Path, about: dict, network: dict, positions: np.ndarray) -> tuple[int, int, int, float]:
    """Bytes of flash and RAM, median of the instructions of an action, and the largest difference from NumPy."""
    write_header(folder / "policy.h", about, network)
    (folder / "alone.c").write_text(ALONE)
    subprocess.run(["arm-none-eabi-gcc", *FLAGS.split(), "-c", "alone.c"], cwd=folder, check=True)
    command = ["arm-none-eabi-size", "alone.o"]
    sizes = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout
    text, data, bss = map(int, sizes.splitlines()[1].split()[:3])
    expected = play_policy.q_values(network, positions)
    rows = ",\n".join("{" + ",".join(map(str, x.ravel())) + "}" for x in positions)
    (folder / "program.c").write_text(PROGRAM % (positions[0].size, rows, expected.shape[1]))
    (folder / "board.ld").write_text(LINKER_SCRIPT)
    command = ["arm-none-eabi-gcc", *FLAGS.split(), "-nostartfiles", "-T", "board.ld", "program.c", "-o", "program.elf"]
    subprocess.run(command, cwd=folder, check=True)
    command = [*QEMU.split(), "program.elf"]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, timeout=600)
    words = [[int(x, 16) for x in line.split()] for line in (result.stdout + result.stderr).splitlines()]
    ticks, found = np.array(words)[:, 0], np.array(words, np.uint32)[:, 1:].copy().view(np.float32)
    instructions = INSTRUCTIONS_PER_TICK * np.median(ticks)
    return text + data, data + bss, int(instructions), float(np.abs(found - expected).max())


def main(args: Args) -> None:
    missing = [x for x in ("arm-none-eabi-gcc", "qemu-system-arm") if not shutil.which(x)]
    if missing:
        sys.exit(f"{' and '.join(missing)} not found: the packages are named at the top of this file")
    if args.n_positions < 1:
        sys.exit(f"--n-positions must be at least 1, not {args.n_positions}")
    about, networks = play_policy.load_policy(args.policy)
    if not about["script"].endswith("_minatar"):
        sys.exit(f"{args.policy} is a policy of {about['script']}.py: give one of MinAtar")
    network = networks["target"]
    positions = real_positions(args.policy, about, network, args.n_positions)
    n_kept, n_weights = play_policy.count_weights(network)
    cases = {f"{1 - n_kept / n_weights:.3f}, as trained": network, "dense": prune(network, 0)}
    cases |= {f"{sparsity}": prune(network, sparsity) for sparsity in (0.3, 0.5, 0.85, 0.95)}
    cases["no hidden weight"] = prune(network, 1)
    print(f"{args.policy.name} on {len(positions)} positions of {about['args']['env_id']}\n")
    print("| sparsity | flash, bytes | RAM, bytes | instructions per action | largest difference from NumPy |")
    print("|---|---|---|---|---|")
    for name, x in cases.items():
        with tempfile.TemporaryDirectory() as folder:
            try:
                flash, ram, instructions, difference = measure(Path(folder), about, x, positions)
            except subprocess.CalledProcessError as error:  # without libnewlib gcc finds no string.h
                sys.exit(f"{error.cmd[0]} failed: are all packages installed that are named at the top of this file?")
        print(f"| {name} | {flash:,} | {ram:,} | {instructions:,} | {difference:.1e} |", flush=True)
        if not difference <= 1e-4:  # NaN, too
            sys.exit("the Q-values differ by more than 1e-4")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
