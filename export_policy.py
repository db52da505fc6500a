# /// script
# requires-python = ">=3.11"
# dependencies = ["numpy>=2", "onnx>=1.16", "tyro>=1.0"]
# ///
"""Turns a trained policy into a C header, sparse where that is smaller, or into an ONNX file, dense.

    python export_policy.py runs/... --c policy.h --main example.c
    cc -O3 -march=native example.c -o policy -lm
    python export_policy.py runs/... --onnx policy.onnx

The header needs no library but C's own. Outputs agree with those of `play_policy.py` to 1e-4 of the largest.
"""

import dataclasses
import importlib.util
import io
import itertools
import json
import os
import re
import shlex
import signal
import sys
import tempfile
import zipfile
from pathlib import Path
from string import Template
from typing import NamedTuple, NoReturn

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports below ends it without a traceback

import numpy as np
import tyro

FRAME, STACK = (84, 84), 4  # pixels of a frame, frames of an observation
GRID = 10  # cells of a side of MinAtar's world
TOOL = "this exporter"  # in messages
MARK = "Written by export_policy.py"  # in C: a file without it is somebody's own


# ---- Arguments -------------------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Args:
    path: tyro.conf.Positional[Path]  # the folder of a run, or its policy.npz
    c: Path | None = None  # header of C99 and C++ to write; a layer is without its zeros where that is smaller
    main: Path | None = None  # small C program to write around the header: it reads observations and prints outputs
    onnx: Path | None = None  # file to write for ONNX Runtime, which knows no sparse weights
    name: str = "policy"  # what all names in the header begin with


def fail(message: str) -> NoReturn:
    """A mistake of the person at the keyboard: one message, exit code 2, no traceback."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def check_args(args: Args) -> None:
    outputs = {f"--{name}": getattr(args, name) for name in ("c", "main", "onnx") if getattr(args, name)}
    if not outputs:
        fail("there is nothing to write: give --c policy.h, --onnx policy.onnx or both")
    if args.main and not args.c:
        fail("--main is written around a header: give --c policy.h, too")
    if not re.fullmatch("[A-Za-z][A-Za-z0-9_]*", args.name):
        fail(f"--name {args.name!r} is no name in C: give letters, digits and _, with a letter first")
    for flag, path, suffix in (("--c", args.c, ".h"), ("--main", args.main, ".c")):
        if path and path.suffix != suffix:  # the program of cc has none
            fail(f"{flag} {path} must be a {suffix} file, such as policy{suffix}")
    for flag, path in outputs.items():
        if not str(path).isprintable():
            fail(f"{flag} {str(path)!r} cannot be printed: choose another path")
    if args.onnx and not importlib.util.find_spec("onnx"):
        fail("--onnx needs a package: pip install onnx")
    policy = args.path / "policy.npz" if args.path.is_dir() else args.path
    files = {"the policy": policy, **outputs}
    if args.main:
        program = files["the program of --name"] = Path(args.name)
        if program.exists() and not (program.is_file() and os.access(program, os.X_OK)):
            fail(f"the program would be written over {args.name}, which is none: choose another --name")
    for (flag, path), (other, other_path) in itertools.combinations(files.items(), 2):
        if path.resolve() == other_path.resolve():
            fail(f"{flag} and {other} would be the same file, {path}")
    for flag, path in outputs.items():
        check_output(path)
        if flag != "--onnx" and path.exists() and MARK.encode() not in path.read_bytes():
            fail(f"{path} was not written by export_policy.py: remove it, or choose another file with {flag}")


def check_folder(folder: Path) -> None:
    """Better now than after the work."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        fail(f"cannot write to {folder}: {error.strerror}")


def check_output(path: Path) -> None:
    check_folder(path.parent)
    if path.exists() and not path.is_file():  # a device would be replaced by a file
        fail(f"{path} is a folder or a device")


def write_whole(path: Path, content: bytes) -> None:
    """There as a whole or not at all."""
    target = path.resolve()  # behind a link
    temporary = target.with_name(f".{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content)
        temporary.replace(target)
    except OSError as error:  # a full disk
        fail(f"cannot write {path}: {error.strerror}")
    finally:
        temporary.unlink(missing_ok=True)


# ---- Policy file -----------------------------------------------------------------------------------------------------
def load_policy(path: Path | str) -> tuple[dict, dict]:
    """What the file says about itself, and its networks: `target`, or on MuJoCo `actor` and two critics.

    Tensors have their names of flax: `networks["target"]["params"]["Conv_0"]["kernel"]`. Beside them are `layers`, the
    kind of each, and `world`: atari, minatar or mujoco.
    """
    path = Path(path) / "policy.npz" if Path(path).is_dir() else Path(path)
    if not path.exists():
        fail(f"there is no {path}: give a policy.npz, or the folder of a run")
    data = path.read_bytes()
    try:
        zipped = zipfile.ZipFile(io.BytesIO(data))
        members, n_members = zipped.infolist(), int.from_bytes(data[-12:-10], "little")
        if len(members) != n_members:  # a flipped bit in the directory can hide members, of which zipfile says nothing
            raise ValueError
        # Each is read to its end, for its checksum. Not by name: a flipped bit makes a second Conv_1 out of Conv_0.
        arrays = {x.filename.removesuffix(".npy"): np.load(io.BytesIO(zipped.read(x))) for x in members}
        about, networks = json.loads(str(arrays.pop("about"))), {}
        for name, x in arrays.items():
            network, params, rest = name.split("/", 2)
            layer, _, tensor = rest.rpartition("/")  # a layer within another one has a name such as Block_0/Conv_0
            networks.setdefault(network, {}).setdefault(params, {}).setdefault(layer, {})[tensor] = x
        kinds = about.get("layers", {})
        for name, network in networks.items():
            layers = {layer: dict(kind) for layer, kind in kinds.get(name, {}).items()}
            network |= {"layers": layers, "world": about["script"].rpartition("_")[2]}
        playing = networks["target" if "target" in networks else "actor"]
        if not isinstance(about["args"], dict) or not isinstance(about["step"], int) or "params" not in playing:
            raise ValueError
    except Exception:  # there are a dozen kinds
        fail(f"{path} is damaged, or it is not the policy.npz of a run")
    if "env_id" not in about["args"]:
        fail(f"{path} does not say its env_id")
    check_network(path, playing)
    return about, networks


def layer_names(layers: dict) -> list[str]:
    """In the order of the network: Dense_2 comes before Dense_10, which JAX sorts as text."""
    stems = {name: name.rstrip("0123456789") for name in layers}
    order = list(stems.values())
    return sorted(layers, key=lambda name: (order.index(stems[name]), len(name), name))


def check_network(path: Path, network: dict) -> None:
    """Follows the sizes through the layers of a network: what is not known here, or does not fit, gets its own line."""
    layers, params, world = network["layers"], network["params"], network["world"]
    if world not in ("atari", "minatar", "mujoco"):
        fail(f"{TOOL} does not know the world {world} of {path}")
    if not layers:
        fail(f"{path} does not say what its layers are: its script is older, or its network has no `layers`")
    for name in [*params, *layers]:
        if layers.get(name, {}).get("kind") not in ("convolution", "dense"):
            fail(f"{TOOL} does not know layer {name}")
    n_pixels = {"atari": FRAME[0], "minatar": GRID, "mujoco": 0}[world]  # of a side of what comes into a layer
    n_inputs = STACK if world == "atari" else None  # what comes into a layer; of a convolution its channels
    names = layer_names(layers)
    if world == "mujoco" and len(names) < 2:
        fail(f"{path} has an actor of one layer: it has two at least, for the mean and for the standard deviation")
    for name in names if world != "mujoco" else names[:-1]:
        layer, tensors = layers[name], params.get(name, {})
        if tensors.keys() != {"kernel", "bias"}:
            fail(f"layer {name} of {path} has {', '.join(tensors) or 'no weights'}, not a kernel and a bias")
        for x in tensors.values():
            with np.errstate(over="ignore"):
                if x.dtype.kind != "f" or not np.isfinite(x.astype(np.float32)).all():
                    fail(f"layer {name} of {path} has {x.dtype} weights that are not finite floats")
        shape, convolution = tensors["kernel"].shape, layer["kind"] == "convolution"
        fits = len(shape) == (4 if convolution else 2) and 0 not in shape and tensors["bias"].shape == shape[-1:]
        if fits and convolution:
            size, stride, padding = shape[0], layer.get("stride"), layer.get("padding")
            if padding not in ("SAME", "VALID") or type(stride) is not int or stride < 1:
                fail(f"{TOOL} does not know stride {stride} with padding {padding} of layer {name}")
            fits = size == shape[1] and n_inputs in (shape[2], None) and n_pixels >= size
            n_pixels = count_outputs(n_pixels, size, stride, padding)
        elif fits:
            n_inputs = n_pixels**2 * n_inputs if n_pixels and n_inputs else n_inputs
            n_pixels = 0
            fits = n_inputs in (shape[0], None) and (world == "mujoco" or name != names[0])
        if not fits:
            fail(f"layer {name} of {path} has a kernel of shape {shape}, which does not fit here")
        n_inputs = shape[-1]
    if n_pixels:
        fail(f"{path} ends with {names[-1]}, a convolution: {TOOL} does not know what comes out")


# ---- Layers ----------------------------------------------------------------------------------------------------------
def count_outputs(n_pixels: int, size: int, stride: int, padding: str) -> int:
    """Per side of the image that comes out of a convolution."""
    return -(-n_pixels // stride) if padding == "SAME" else (n_pixels - size) // stride + 1


def drop_idle_units(params: dict, names: list[str]) -> dict:
    """Without hidden units that have no weight to the next layer: nobody sees them. Pruning leaves many before a narrow
    output: with 6 actions, a unit whose weights are pruned at random to 95 % is idle with p = 0.95**6 = 0.74."""
    params = dict(params)
    dense = [name for name in names if params[name]["kernel"].ndim == 2]
    for next_name, name in itertools.pairwise(dense[::-1]):  # from the output on, as idle units make others idle
        layer, next_layer = params[name], params[next_name]
        used = next_layer["kernel"].any(axis=1)
        params[name] = {"kernel": layer["kernel"][:, used], "bias": layer["bias"][used]}
        params[next_name] = next_layer | {"kernel": next_layer["kernel"][used]}
    return params


def count_weights(network: dict) -> tuple[int, int]:
    """Weights that are not zero, and all, of those that can be pruned: not the biases."""
    kernels = [x for layer in network["params"].values() for x in layer.values() if x.ndim > 1]
    return sum(np.count_nonzero(x) for x in kernels), sum(x.size for x in kernels)


class PlanarLayer(NamedTuple):
    """What comes in and goes out is a vector, or an image: one channel after the other, but for a layer `by_cell`."""

    name: str
    kernel: np.ndarray  # (size, size, n_inputs, n_outputs) of a convolution, or (n_inputs, n_outputs)
    bias: np.ndarray  # (n_outputs,)
    stride: int = 0  # 0 if it is no convolution, as for all that follows
    padding: str = ""  # SAME or VALID
    n_pixels: int = 0  # of a side of the image that comes in
    n_pixels_out: int = 1  # and goes out
    start: int = 0  # pixels of padding before the image
    width: int = 0  # of the padded image, in blocks of stride x stride pixels
    by_cell: bool = (
        False  # skips the cells of MinAtar's observation that are 0; what goes out is (row, column, channel)
    )

    @property
    def n_planes(self) -> int:
        """Into which the padded image is cut."""
        return self.stride**2 * self.kernel.shape[-2]

    @property
    def length(self) -> int:
        """Of what a weight of a convolution is multiplied with: rows of a plane, without the last one's end."""
        return self.width * (self.n_pixels_out - 1) + self.n_pixels_out


def planar_layers(network: dict, drop_idle: bool = True, allow_by_cell: bool = True) -> list[PlanarLayer]:
    """Of the network that plays, without the hidden units that nobody sees. Atari's pixels come as 0 to 255."""
    params, world, names, layers = network["params"], network["world"], layer_names(network["layers"]), []
    if world == "mujoco":
        names.pop()  # an actor ends with two heads: the mean, and the logarithm of the standard deviation
    params = drop_idle_units(params, names) if drop_idle else params
    n_pixels, n_channels = {"atari": FRAME[0], "minatar": GRID, "mujoco": 0}[world], 0
    # Only before a dense layer: a second convolution expects one channel after the other.
    by_cell = allow_by_cell and world == "minatar" and params[names[1]]["kernel"].ndim == 2
    for name in names:
        kernel, bias = (params[name][x].astype(np.float32) for x in ("kernel", "bias"))
        if kernel.ndim == 4:
            if world == "atari" and not layers:
                kernel = kernel / np.float32(255)
            kind, size, n_channels = network["layers"][name], len(kernel), len(bias)
            stride, padding = kind["stride"], kind["padding"]
            n_outputs = count_outputs(n_pixels, size, stride, padding)
            missing = max((n_outputs - 1) * stride + size - n_pixels, 0)  # 0 if the padding is VALID
            width = n_outputs + -(-size // stride) - 1
            layer = PlanarLayer(name, kernel, bias, stride, padding, n_pixels, n_outputs, missing // 2, width)
            layers.append(layer._replace(by_cell=by_cell and stride == 1))
            n_pixels = n_outputs
        else:
            if n_pixels and not layers[-1].by_cell:  # the kernel expects (row, column, channel), as JAX flattens it
                kernel = kernel.reshape(n_pixels**2, n_channels, -1).swapaxes(0, 1).reshape(len(kernel), -1)
            layers.append(PlanarLayer(name, kernel, bias))
            n_pixels = 0
    return layers


def words_of(layers: list[PlanarLayer], world: str) -> dict:
    """What comes in and what goes out, in the words of C."""
    actor = world == "mujoco"
    n_channels = layers[0].kernel.shape[-2]  # of an actor all inputs
    shape = {"atari": (n_channels, *FRAME), "minatar": (GRID, GRID, n_channels), "mujoco": (n_channels,)}[world]
    return {
        "shape": shape,
        "n_inputs": " * ".join(map(str, shape)),
        "type": "float" if actor else "uint8_t",
        "output": "action" if actor else "q_values",
        "n_outputs": len(layers[-1].bias),
    }


# ---- C: the pieces of text -------------------------------------------------------------------------------------------
SIGNATURE = Template("void ${name}_$output(const $type observation[$n_inputs], float $output[$n_outputs])")

HEAD = Template("""\
/* $title.
   $mark: C99 and C++, no library but C's own, an int of 32 bits.

   $signature

   $meaning

   The network has a sparsity of $sparsity.
   $weights of $n_weights weights are needed: the others are zero, or of hidden units that lead to no output.
   Flash: $flash bytes of constants, and the code. RAM: $ram bytes, static, beside the observation and the
   outputs, which are yours: include it in one file of a program, and do not call it from two threads at once.
   On the stack are a few local variables, no arrays.

       #include "$file"

       static $type observation[$n_inputs];
       float $output[$n_outputs];
       ${name}_$output(observation, $output); */
#ifndef ${name}_H_
#define ${name}_H_

$includes""")

# A weight of a convolution is multiplied with one piece of a plane: rows, one after the other, each with a few numbers
# too many at its end, which nobody reads. The sum of a convolution lies behind the planes: where gcc 12 knew that they
# do not overlap, -O3 interchanged the loops over weights and pixels, and it took 14 times as long.
PLANES = Template("""\
/* One plane for each channel. A weight of the convolution is then multiplied with one piece of a plane, which is
   contiguous. */
static void ${layer}_cut(const $type *x, float *planes) {
$zeros  for (int channel = 0; channel < $n_channels; channel++, planes += $width * $width)
    for (int row = 0; row < $n_rows; row++)
      for (int column = 0; column < $n_rows; column++) planes[$place] = (float)x[$pixel];
}
""")

CUT = Template("""\
/* Cuts the image into blocks of $stride x $stride pixels. All pixels at one place of their blocks make a plane.
   A weight of the convolution is then multiplied with one piece of a plane, which is contiguous. */
static void ${layer}_cut(const $type *x, float *planes) {
$zeros  for (int down = 0; down < $stride; down++)
    for (int right = 0; right < $stride; right++)
      for (int channel = 0; channel < $n_channels; channel++) {
        for (int row = (down + $shift) % $stride; row < $n_rows; row += $stride)
          for (int column = (right + $shift) % $stride; column < $n_rows; column += $stride)
            planes[(row + $start) / $stride * $width + (column + $start) / $stride] = (float)x[$pixel];
        planes += $width * $width;
      }
}
""")

ZEROS = Template("  memset(planes, 0, $n_planes * $width * $width * sizeof(float)); /* zeros around the image */\n")

CONVOLUTION = Template("""\
static void $layer(float *x, float *y) {
  float *sum = x + $n_planes * $width * $width; /* behind the planes, in rows of $width */
  for (int output = 0; output < $n_outputs; output++) {
    const float *weights = ${layer}_weights + $first;
    const ${index}_t *pieces = $pieces;
    int i, n = $n;
    for (i = 0; i < $length; i++) sum[i] = ${layer}_bias[output];
    for (; n >= 4; n -= 4, weights += 4, pieces += 4) { /* four at a time: sum is read and written less often */
      const float *a = x + pieces[0], *b = x + pieces[1], *c = x + pieces[2], *d = x + pieces[3];
      for (i = 0; i < $length; i++)
        sum[i] += weights[0] * a[i] + weights[1] * b[i] + weights[2] * c[i] + weights[3] * d[i];
    }
    for (; n > 0; n--, weights++, pieces++)
      for (i = 0; i < $length; i++) sum[i] += weights[0] * x[pieces[0] + i];
    for (int row = 0; row < $n_pixels_out; row++)
      for (int column = 0; column < $n_pixels_out; column++) {
        const float value = sum[row * $width + column];
        *y++ = value < 0 ? 0 : value;
      }
  }
}
""")

CELLS = Template("""\
/* Skips cells that are 0, as most are. Any other is added to the output pixels that see it, up to $size x $size. */
static void $layer(const uint8_t *x, float *y) {
  int i, k;
  for (i = 0; i < $area; i++)
    for (k = 0; k < $n_outputs; k++) y[i * $n_outputs + k] = ${layer}_bias[k];
  for (int row = $start; row < $n_pixels + $start; row++)
    for (int column = $start; column < $n_pixels + $start; column++)
      for (int channel = 0; channel < $n_channels; channel++) {
        const uint8_t cell = *x++;
        if (cell == 0) continue;
        for (int down = 0; down < $size; down++) {
          const int to_row = row - down;
          if (to_row < 0 || to_row >= $n_pixels_out) continue;
          for (int right = 0; right < $size; right++) {
            const int to_column = column - right;
            if (to_column < 0 || to_column >= $n_pixels_out) continue;
            const float *weights = ${layer}_weights + ((channel * $size + down) * $size + right) * $n_outputs;
            float *sum = y + (to_row * $n_pixels_out + to_column) * $n_outputs;
            for (k = 0; k < $n_outputs; k++) sum[k] += (float)cell * weights[k];
          }
        }
      }
  for (i = 0; i < $area * $n_outputs; i++)
    if (y[i] < 0) y[i] = 0;
}
""")

# By input, as many are 0 after a ReLU and can be skipped.
DENSE = Template("""\
static void $layer(const float *x, float *y) {
  const float *weights = ${layer}_weights;
  int i, k;
  for (k = 0; k < $n_outputs; k++) y[k] = ${layer}_bias[k];
  for (i = 0; i < $n_inputs; i++, weights += $n_outputs) {
    const float input = x[i];
    if (input != 0)
      for (k = 0; k < $n_outputs; k++) y[k] += input * weights[k];
  }
$relu}
""")

SPARSE = Template("""\
static void $layer(const float *x, float *y) {
  const float *weights = ${layer}_weights;
  const ${index}_t *outputs = ${layer}_outputs;
  int i, k;
  for (k = 0; k < $n_outputs; k++) y[k] = ${layer}_bias[k];
  for (i = 0; i < $n_inputs; i++) {
    const float input = x[i];
    const int n = ${layer}_counts[i];
    if (input != 0) {
      for (k = 0; k + 4 <= n; k += 4) {
        y[outputs[k]] += input * weights[k];
        y[outputs[k + 1]] += input * weights[k + 1];
        y[outputs[k + 2]] += input * weights[k + 2];
        y[outputs[k + 3]] += input * weights[k + 3];
      }
      for (; k < n; k++) y[outputs[k]] += input * weights[k];
    }
    weights += n, outputs += n;
  }
$relu}
""")

RELU = Template("""\
  for (k = 0; k < $n_outputs; k++)
    if (y[k] < 0) y[k] = 0;
""")

MAIN = Template("""\
/* $mark. It reads observations from standard input,
   $n_inputs numbers each, and prints the $output of each in a line.

       $command
*/
#include <stdio.h>

#include "$file"

int main(void) {
  static $type observation[$n_inputs];
  float $output[$n_outputs];
  $number number;
  int n = 0, found;
  while ((found = scanf("$code", &number)) == 1) {
    observation[n] = ($type)number;
    if (observation[n] != number) {
      fprintf(stderr, "error: number %d of an observation is not $range\\n", n + 1);
      return 2;
    }
    if (++n < $n_inputs) continue;
    ${name}_$output(observation, $output);
    for (n = 0; n < $n_outputs; n++) printf("%.9g%c", (double)$output[n], n < $n_outputs - 1 ? ' ' : '\\n');
    fflush(stdout);
    if (ferror(stdout)) {
      perror("error");
      return 2;
    }
    n = 0;
  }
  if (n == 0 && found == EOF && !ferror(stdin)) return 0;
  fprintf(stderr, "error: number %d of the $n_inputs of an observation is missing or no number\\n", n + 1);
  return 2;
}
""")


# ---- C: the layers ---------------------------------------------------------------------------------------------------
def smallest(x: np.ndarray) -> np.ndarray:
    """In the smallest type of integers that holds it."""
    return x.astype(np.min_scalar_type(int(x.max(initial=0))))


def dense_arrays(layer: PlanarLayer, sparse: bool) -> dict[str, np.ndarray]:
    """The constants of a dense layer: all weights, or those that are not zero and where they belong."""
    kernel = layer.kernel
    if not sparse:
        return {"bias": layer.bias, "weights": kernel.ravel()}
    inputs, outputs = np.nonzero(kernel)
    counts = smallest(np.bincount(inputs, minlength=len(kernel)))  # of weights that an input has
    return {"bias": layer.bias, "counts": counts, "outputs": smallest(outputs), "weights": kernel[kernel != 0]}


def convolution_arrays(layer: PlanarLayer, sparse: bool) -> dict[str, np.ndarray]:
    """The same of a convolution. A weight belongs to a piece of a plane, given by its start."""
    kernel, stride = layer.kernel, layer.stride
    row, column, channel = np.indices(kernel.shape[:3])
    plane = (row % stride * stride + column % stride) * kernel.shape[2] + channel
    pieces = ((plane * layer.width + row // stride) * layer.width + column // stride).ravel()
    table = kernel.reshape(len(pieces), -1).T  # (n_outputs, n_pieces)
    if not sparse:
        return {"bias": layer.bias, "pieces": smallest(pieces), "weights": table.ravel()}
    outputs, places = np.nonzero(table)
    starts = smallest(np.searchsorted(outputs, np.arange(len(table) + 1)))  # where the weights of an output start
    return {"bias": layer.bias, "starts": starts, "pieces": smallest(pieces[places]), "weights": table[table != 0]}


def arrays_of(layer: PlanarLayer, sparse: bool) -> dict[str, np.ndarray]:
    if layer.by_cell:  # all weights: their zeros are few bytes, and on a microcontroller lists of the others are slower
        return {"bias": layer.bias, "weights": layer.kernel.transpose(2, 0, 1, 3).ravel()}
    return (convolution_arrays if layer.stride else dense_arrays)(layer, sparse)


def best_arrays(layer: PlanarLayer) -> tuple[bool, dict[str, np.ndarray]]:
    """Whether it is written sparse, and how. It is where that is smaller: on a microcontroller a large layer then takes
    fewer instructions, too; on a processor with wide vectors it can take more time (benchmark/README.md)."""
    sparse, dense = arrays_of(layer, sparse=True), arrays_of(layer, sparse=False)
    smaller = count_bytes(sparse) < count_bytes(dense)
    return smaller, sparse if smaller else dense


def count_bytes(arrays: dict[str, np.ndarray]) -> int:
    return sum(x.nbytes for x in arrays.values())


def array_text(name: str, x: np.ndarray) -> str:
    """Floats have as many digits as tell them apart from all others: none is changed."""
    words = x.astype(str).tolist() or ["0"]  # no array of C is empty
    kind = "float" if x.dtype.kind == "f" else f"{x.dtype}_t"
    words = [f"{word}f" for word in words] if x.dtype.kind == "f" and x.size else words
    lines = [", ".join(words[i : i + 10]) for i in range(0, len(words), 10)]
    return f"static const {kind} {name}[{len(words)}] = {{\n  " + ",\n  ".join(lines) + "};\n"


def plain(text) -> str:
    """Fit for a comment in C, whatever the file says."""
    return re.sub(r"[^\w ()/.,-]", "_", str(text), flags=re.ASCII)


def constants_text(name: str, layer: PlanarLayer, what: str, sparse: bool, arrays: dict[str, np.ndarray]) -> str:
    kept = f"{np.count_nonzero(layer.kernel):,} of {layer.kernel.size:,} weights are not zero"
    note = "only they are written" if sparse else "all are written"
    comment = f"/* {plain(layer.name)}: {what}.\n   {kept}: {note}. */\n"
    return comment + "".join(array_text(f"{name}_{key}", x) for key, x in arrays.items())


def convolution_name(layer: PlanarLayer) -> str:
    size, _, n_channels, n_outputs = layer.kernel.shape
    what = f"convolution of {size} x {size} with stride {layer.stride}"
    what += f" from {layer.n_pixels} x {layer.n_pixels} x {n_channels}"
    return f"{what} to {layer.n_pixels_out} x {layer.n_pixels_out} x {n_outputs}"


def cells_text(name: str, layer: PlanarLayer) -> str:
    """Its constants and its function."""
    size, _, n_channels, n_outputs = layer.kernel.shape
    words = layer._asdict() | {"layer": name, "size": size, "n_channels": n_channels, "n_outputs": n_outputs}
    constants = constants_text(name, layer, convolution_name(layer), False, arrays_of(layer, sparse=False))
    return constants + CELLS.substitute(words, area=layer.n_pixels_out**2)


def convolution_text(name: str, layer: PlanarLayer, world: str, is_first: bool) -> str:
    """Its constants and its two functions."""
    sparse, arrays = best_arrays(layer)
    n_channels, n_outputs = layer.kernel.shape[2:]
    n, width, start = layer.n_pixels, layer.width, layer.start
    n_rows = min(n, width * layer.stride - start)  # VALID can leave some pixels over
    first = f"{name}_starts[output]" if sparse else f"output * {len(arrays['pieces'])}"
    words = layer._asdict() | {
        "layer": name,
        "type": "uint8_t" if is_first else "float",
        "index": arrays["pieces"].dtype,
        "n_channels": n_channels,
        "n_outputs": n_outputs,
        "n_planes": layer.n_planes,
        "length": layer.length,
        "shift": -start % layer.stride,  # the first row that starts a block
        "n_rows": n_rows,
        # What follows is C.
        "place": f"(row + {start}) * {width} + column + {start}" if start else f"row * {width} + column",
        "pixel": f"(channel * {n} + row) * {n} + column",
        "first": first,
        "pieces": f"{name}_pieces + {first}" if sparse else f"{name}_pieces",
        "n": f"{name}_starts[output + 1] - {first}" if sparse else len(arrays["pieces"]),
    }
    if world == "minatar" and is_first:
        words["pixel"] = f"(row * {n} + column) * {n_channels} + channel"
    words["zeros"] = ZEROS.substitute(words) if n_rows < width * layer.stride else ""
    cut = (PLANES if layer.stride == 1 else CUT).substitute(words)
    constants = constants_text(name, layer, convolution_name(layer), sparse, arrays)
    return f"{cut}\n{constants}{CONVOLUTION.substitute(words)}"


def dense_text(name: str, layer: PlanarLayer, is_last: bool) -> str:
    """Its constants and its function."""
    sparse, arrays = best_arrays(layer)
    n_inputs, n_outputs = layer.kernel.shape
    words = {
        "layer": name,
        "n_inputs": n_inputs,
        "n_outputs": n_outputs,
        "index": arrays["outputs"].dtype if sparse else "",
        "relu": "" if is_last else RELU.substitute(n_outputs=n_outputs),
    }
    what = f"dense layer from {n_inputs} to {n_outputs}"
    return constants_text(name, layer, what, sparse, arrays) + (SPARSE if sparse else DENSE).substitute(words)


# ---- C: the header and the program around it -------------------------------------------------------------------------
MEANINGS = {
    "atari": """observation[(frame * 84 + row) * 84 + column]: four frames in grey, 0 to 255, the newest last.
   Q-values are in the order of the game's minimal action set. The largest is that of the greedy action.""",
    "minatar": """observation[(row * 10 + column) * $n_channels + channel]: the state of the game, 0 or 1.
   Q-values are in the order of the game's minimal action set$actions.
   The largest is that of the greedy action.""",
    "mujoco": """An observation is that of the environment, neither scaled nor clipped.
   An action is from -1 to 1: tanh is included. That of the task is low + (action + 1) / 2 * (high - low),
   where low and high are the bounds of its action space.""",
}
ACTIONS = {  # of MinAtar's minimal action sets
    "Asterix": "none, left, up, right, down",
    "Breakout": "none, left, right",
    "Freeway": "none, up, down",
    "Seaquest": "none, left, up, right, down, fire",
    "SpaceInvaders": "none, left, right, fire",
}


def calls_of(layers: list[PlanarLayer]) -> tuple[list[tuple[str, str, str]], dict[str, int]]:
    """Each function, what it reads and what it writes; and how many numbers the two buffers hold, which take turns."""
    steps = []  # the functions, and how many numbers each writes
    for i, layer in enumerate(layers):
        if layer.stride and not layer.by_cell:
            steps.append((f"layer_{i}_cut", layer.n_planes * layer.width**2 + layer.length))
        steps.append((f"layer_{i}", len(layer.bias) * layer.n_pixels_out**2))
    calls, buffers, source = [], {}, "observation"
    for function, size in steps[:-1]:
        target = "buffer_b" if source == "buffer_a" else "buffer_a"
        buffers[target] = max(1, size, buffers.get(target, 0))
        calls.append((function, source, target))
        source = target
    return [*calls, (steps[-1][0], source, "output")], buffers


def costs_of(layers: list[PlanarLayer], sparse: bool = True) -> dict[str, int]:
    """Weights that are needed, and bytes."""
    arrays = [best_arrays(layer)[1] if sparse else arrays_of(layer, sparse=False) for layer in layers]
    return {
        "weights": sum(np.count_nonzero(x.kernel) if sparse else x.kernel.size for x in layers),
        "flash": sum(map(count_bytes, arrays)),
        "ram": 4 * sum(calls_of(layers)[1].values()),
    }


def path_text(path: str) -> str:
    """As it stands in a comment of C, or after #include."""
    if not path.isprintable() or re.search(r'["*\\]|\?\?', path):  # ??/ is a backslash in C99
        fail(f"{path!r} cannot stand in C: choose a path without quotes, stars, backslashes and the like")
    return path


def header_text(args: Args, about: dict, network: dict, layers: list[PlanarLayer]) -> str:
    name, world, env_id, (calls, buffers) = args.name, network["world"], str(about["args"]["env_id"]), calls_of(layers)
    words = words_of(layers, world) | {"name": name, "file": path_text(args.c.name), "mark": MARK}
    signature, (n_kept, n_all) = SIGNATURE.substitute(words), count_weights(network)
    actions = f" ({ACTIONS[env_id]})" if world == "minatar" and env_id in ACTIONS else ""
    words |= {key: f"{x:,}" for key, x in costs_of(layers).items()}
    parts = [f"static float {name}_{buffer}[{size}];\n" for buffer, size in buffers.items()]
    for i, layer in enumerate(layers):
        if layer.by_cell:
            parts.append(cells_text(f"{name}_layer_{i}", layer))
        elif layer.stride:
            parts.append(convolution_text(f"{name}_layer_{i}", layer, world, i == 0))
        else:
            parts.append(dense_text(f"{name}_layer_{i}", layer, i == len(layers) - 1))
    used = {"math": world == "mujoco", "stdint": True, "string": any("memset(" in part for part in parts)}
    head = HEAD.substitute(
        words,
        title=plain(f"A policy for {env_id}, trained by {about['script']}.py for {about['step']:,} steps"),
        signature=signature,
        meaning=Template(MEANINGS[world]).substitute(n_channels=words["shape"][-1], actions=actions),
        sparsity=f"{1 - n_kept / n_all:.3f}",
        n_weights=f"{sum(network['params'][layer.name]['kernel'].size for layer in layers):,}",
        includes="".join(f"#include <{x}.h>\n" for x in used if used[x]),
    )
    memory = {"observation": "observation", "output": words["output"]} | {x: f"{name}_{x}" for x in buffers}
    body = "".join(f"  {name}_{function}({memory[x]}, {memory[y]});\n" for function, x, y in calls)
    if world == "mujoco":
        body += f"  for (int i = 0; i < {words['n_outputs']}; i++) action[i] = tanhf(action[i]);\n"
    return "\n".join([head, *parts, f"static inline {signature} {{\n{body}}}\n", "#endif\n"])


def compile_command(args: Args) -> str:
    return f"cc -O3 -march=native {shlex.quote(path_text(str(args.main)))} -o {args.name} -lm"


def main_text(args: Args, network: dict, layers: list[PlanarLayer]) -> str:
    words = words_of(layers, network["world"])
    if words["type"] == "uint8_t":
        words |= {"number": "int", "code": "%d", "range": "from 0 to 255"}
    else:
        words |= {"number": "float", "code": "%f", "range": "a number"}
    header = args.c.parent.resolve() / args.c.name  # a compiler follows links before `..`
    words["file"] = path_text(os.path.relpath(header, args.main.parent.resolve()).replace(os.sep, "/"))
    return MAIN.substitute(words, name=args.name, mark=MARK, command=compile_command(args))


# ---- ONNX ------------------------------------------------------------------------------------------------------------
def onnx_bytes(network: dict) -> bytes:
    """Takes a batch of observations as the environment gives them; out come `q_values`, or `action`, from -1 to 1."""
    import onnx.checker
    from onnx import TensorProto, helper, numpy_helper

    layers = planar_layers(network, allow_by_cell=False)
    words, nodes, tensors = words_of(layers, network["world"]), [], []

    def add(operator: str, *weights: str, **options) -> None:
        inputs = [nodes[-1].output[0] if nodes else "observations", *weights]
        nodes.append(helper.make_node(operator, inputs, [f"x_{len(nodes)}"], **options))

    add("Cast", to=TensorProto.FLOAT)
    if network["world"] == "minatar":
        add("Transpose", perm=[0, 3, 1, 2])
    for i, layer in enumerate(layers):
        kernel, weights = layer.kernel, (f"kernel_{i}", f"bias_{i}")
        if layer.stride:
            kernel, padding = kernel.transpose(3, 2, 0, 1), "SAME_UPPER" if layer.padding == "SAME" else "VALID"
            add("Conv", *weights, strides=[layer.stride] * 2, auto_pad=padding)
        else:
            add("Flatten")
            add("Gemm", *weights)
        tensors += [numpy_helper.from_array(x, name) for x, name in zip((kernel, layer.bias), weights)]
        if i < len(layers) - 1:
            add("Relu")
    if network["world"] == "mujoco":
        add("Tanh")
    nodes[-1].output[0] = words["output"]
    kind = TensorProto.UINT8 if words["type"] == "uint8_t" else TensorProto.FLOAT
    inputs = helper.make_tensor_value_info("observations", kind, ("batch", *words["shape"]))
    outputs = helper.make_tensor_value_info(words["output"], TensorProto.FLOAT, ("batch", words["n_outputs"]))
    graph = helper.make_graph(nodes, "policy", [inputs], [outputs], tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)  # of 2022
    onnx.checker.check_model(model)
    return model.SerializeToString()


# ---- Main ------------------------------------------------------------------------------------------------------------
def print_costs(n_bytes: int, layers: list[PlanarLayer], dense_layers: list[PlanarLayer]) -> None:
    """Of the header, and of one for the same network if it had not been pruned."""
    here, dense = costs_of(layers), costs_of(dense_layers, sparse=False)
    print(f"{'The header':20}{'as it is':>14}{'dense':>14}")
    print(f"{'Bytes in the file':20}{n_bytes:14,}{'-':>14}")
    for name, key in (("Bytes of constants", "flash"), ("Bytes of RAM", "ram"), ("Weights needed", "weights")):
        print(f"{name:20}{here[key]:14,}{dense[key]:14,}")


def export_policy(args: Args) -> None:
    check_args(args)
    about, networks = load_policy(args.path)
    network, contents = networks["target" if "target" in networks else "actor"], {}
    layers = planar_layers(network)
    if args.c:
        contents[args.c] = header_text(args, about, network, layers).encode()
    if args.main:
        contents[args.main] = main_text(args, network, layers).encode()
    if args.onnx:
        contents[args.onnx] = onnx_bytes(network)
    for path, content in contents.items():
        write_whole(path, content)
        print(f"Written: {shlex.quote(str(path))}, {len(content):,} bytes")
    if args.c:
        print_costs(len(contents[args.c]), layers, planar_layers(network, drop_idle=False))
    if args.main:
        print(compile_command(args))


def main(args: Args) -> None:
    try:
        export_policy(args)
    except (OSError, ImportError) as error:  # a missing file, a full disk, a missing package
        fail(str(error))
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    given = tyro.cli(Args, description=__doc__)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # from here on `main` has the last word
    main(given)
