"""A trained network in C, or for ONNX Runtime: the same numbers as in NumPy, and code that any compiler takes."""

import dataclasses
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import export_policy
import play_policy
from export_policy import Args

ROOT = Path(export_policy.__file__).parent
C = ["cc", "-std=c99", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-O1"]
CPP = ["c++", "-std=c++11", "-x", "c++", *C[2:]]
SANITIZERS = ["-g", "-fsanitize=address,undefined", "-fno-sanitize-recover"]
needs_a_compiler = pytest.mark.skipif(not (shutil.which("cc") and shutil.which("c++")), reason="no C or C++ compiler")


def random_network(world, sparsity, kernels, strides=(), padding="SAME"):
    """As `load_policy` gives it. Kernels are given by their shapes, and biases are not zero, as learned ones."""
    rng, params, layers = np.random.default_rng(0), {}, {}
    for i, shape in enumerate(kernels):
        name = f"Conv_{i}" if i < len(strides) else f"Dense_{i - len(strides)}"
        kernel = rng.normal(0, np.prod(shape[:-1]) ** -0.5, shape) * (rng.random(shape) >= sparsity)
        params[name] = {"kernel": kernel.astype(np.float32), "bias": rng.normal(0, 0.1, shape[-1]).astype(np.float32)}
        layers[name] = {"kind": "dense"}
        if i < len(strides):
            layers[name] = {"kind": "convolution", "stride": strides[i], "padding": padding}
    return {"params": params, "layers": layers, "world": world}


def q_network(sparsity, features=(2, 3, 3, 4), n_actions=6):
    a, b, c, n_hidden = features
    kernels = (8, 8, 4, a), (4, 4, a, b), (3, 3, b, c), (121 * c, n_hidden), (n_hidden, n_actions)
    return random_network("atari", sparsity, kernels, (4, 2, 1))


def grid_network(sparsity, features=(4, 8), n_channels=4, n_actions=3):
    a, n_hidden = features
    kernels = (3, 3, n_channels, a), (64 * a, n_hidden), (n_hidden, n_actions)
    return random_network("minatar", sparsity, kernels, (1,), "VALID")


def actor_network(sparsity, features, n_observations=11, n_actions=3):
    kernels = list(itertools.pairwise((n_observations, *features, n_actions)))
    return random_network("mujoco", sparsity, [*kernels, (features[-1], n_actions)])


def policy_of(path, network):
    """A file with this network, as a script writes it."""
    script = {"atari": "eaudedqn_atari", "minatar": "eaudedqn_minatar", "mujoco": "eaudesac_mujoco"}[network["world"]]
    name = "actor" if network["world"] == "mujoco" else "target"
    about = {"script": script, "args": {"env_id": "Pong"}, "step": 70, "layers": {name: network["layers"]}}
    arrays = {f"{name}/params/{x}/{key}": y for x, layer in network["params"].items() for key, y in layer.items()}
    np.savez_compressed(path, about=json.dumps(about), **arrays)
    return path


def change_policy(path, change):
    """`change` gets what the file says about itself, and all arrays by name, to do with them what it wants."""
    arrays = dict(np.load(path))
    about = json.loads(str(arrays.pop("about")))
    change(about, arrays)
    np.savez_compressed(path, about=json.dumps(about), **arrays)
    return path


def minatar_policy(path):
    return policy_of(path, grid_network(0.5))


def compile_c(folder, *flags, compiler=C):
    command = [*compiler, *flags, folder / "example.c", "-o", folder / "program", "-lm"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    return folder / "program"


def export_c(path, **flags):
    """The header and the program around it, beside the policy."""
    path.with_name("example.c").unlink(missing_ok=True)  # another one is not overwritten
    export_policy.main(Args(path, c=path.with_name("policy.h"), main=path.with_name("example.c"), **flags))


def outputs_of(program, observations):
    text = "\n".join(" ".join(map(repr, x.ravel().tolist())) for x in observations)
    result = subprocess.run([program], input=text, capture_output=True, text=True, check=True)
    return np.array([line.split() for line in result.stdout.splitlines()], np.float32)


def expected_of(network, observations):
    layers = play_policy.make_layers(network)
    outputs = play_policy.forward(layers, observations)
    return np.tanh(outputs) if network["world"] == "mujoco" else outputs


def observations_of(network):
    """Random, all 0 and all 255 (on MinAtar 1)."""
    rng, n_inputs = np.random.default_rng(1), network["params"][next(iter(network["layers"]))]["kernel"].shape[-2]
    if network["world"] == "mujoco":
        return np.stack([rng.normal(size=n_inputs), np.zeros(n_inputs), np.full(n_inputs, 255)]).astype(np.float32)
    shape = (4, 84, 84) if network["world"] == "atari" else (10, 10, n_inputs)
    largest = 255 if network["world"] == "atari" else 1
    random = rng.integers(0, largest + 1, shape)
    return np.stack([random, np.zeros(shape), np.full(shape, largest)]).astype(np.uint8)


def assert_close(found, expected):
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5 * max(1, np.abs(expected).max()))


def refused(args, capsys):
    """The one line that a person sees."""
    with pytest.raises(SystemExit) as exit_info:
        export_policy.main(args)
    assert exit_info.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    return error


SPARSITIES = [0.0, 0.5, 0.9, 0.99]
SMALL = {
    "atari": lambda sparsity: q_network(sparsity, (5, 7, 6, 40)),
    "minatar": lambda sparsity: grid_network(sparsity, (16, 128)),
    "minatar, 10 channels": lambda sparsity: grid_network(sparsity, (4, 300), 10, 6),  # 300: an index of 16 bits
    "mujoco": lambda sparsity: actor_network(sparsity, (20, 30, 40)),  # the third layer needs more room than the first
}
PAPER = {
    "atari, 512": lambda: q_network(0.95, (32, 64, 64, 512)),
    "atari, 2048": lambda: q_network(0.99, (32, 64, 64, 2048), 18),
    "minatar, 512": lambda: grid_network(0.5, (16, 512)),
    "minatar, 32": lambda: grid_network(0.0, (16, 32)),
    "mujoco, 256-256": lambda: actor_network(0.9, (256, 256), 17, 6),
    "mujoco, dense": lambda: actor_network(0.0, (256, 256), 348, 17),
    "atari, 32": lambda: q_network(0.3, (32, 64, 64, 32)),  # the convolutions of the paper, dense
    "atari, 1 unit": lambda: q_network(0.0, (1, 1, 1, 1)),
    "minatar, 1 unit": lambda: grid_network(0.0, (1, 1), 1, 1),
    "mujoco, 1 unit": lambda: actor_network(0.0, (1,), 1, 1),
}


# ---- C ---------------------------------------------------------------------------------------------------------------
@needs_a_compiler
@pytest.mark.parametrize("sparsity", SPARSITIES)
@pytest.mark.parametrize("kind", SMALL)
def test_c_gives_the_numbers_of_numpy_in_every_dialect_and_touches_no_memory_but_its_own(kind, sparsity, tmp_path):
    network = SMALL[kind](sparsity)
    export_c(policy_of(tmp_path / "policy.npz", network))
    observations = observations_of(network)
    expected = expected_of(network, observations)
    assert np.abs(expected).max() > 0.01
    dialects = ((C, []), (CPP, []), (C, SANITIZERS)) if sparsity in (0, 0.9) else ((C, []),)
    for compiler, flags in dialects:
        assert_close(outputs_of(compile_c(tmp_path, *flags, compiler=compiler), observations), expected)


@needs_a_compiler
@pytest.mark.parametrize("kind", PAPER)
def test_the_smallest_networks_and_those_of_the_papers_sizes_are_right(kind, tmp_path):
    network = PAPER[kind]()
    export_c(policy_of(tmp_path / "policy.npz", network))
    observations = observations_of(network)
    assert_close(outputs_of(compile_c(tmp_path), observations), expected_of(network, observations))


@needs_a_compiler
def test_the_flags_of_the_readme_change_no_number(tmp_path):
    network = SMALL["minatar"](0.8)
    export_c(policy_of(tmp_path / "policy.npz", network))
    program = compile_c(tmp_path, compiler=["cc", "-O3", "-march=native"])
    observations = observations_of(network)
    assert_close(outputs_of(program, observations), expected_of(network, observations))


def chain(size, stride, padding, sparsity):
    """Two convolutions in a row and a dense layer."""
    n_pixels = 84
    for _ in range(2):
        n_pixels = play_policy.count_outputs(n_pixels, size, stride, padding)
    kernels = (size, size, 4, 3), (size, size, 3, 2), (n_pixels**2 * 2, 3)
    return random_network("atari", sparsity, kernels, (stride, stride), padding)


@needs_a_compiler
@pytest.mark.parametrize("padding", ["SAME", "VALID"])
@pytest.mark.parametrize(("size", "stride"), [(8, 4), (1, 1), (5, 2), (7, 3), (2, 3), (6, 5)])
def test_convolutions_of_any_size_stride_and_padding_are_right(size, stride, padding, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    for sparsity in (0, 0.8):
        network = chain(size, stride, padding, sparsity)
        export_c(policy_of(tmp_path / "policy.npz", network), onnx=tmp_path / "policy.onnx")
        observations = observations_of(network)
        expected = expected_of(network, observations)
        assert_close(outputs_of(compile_c(tmp_path, *SANITIZERS), observations), expected)
        session = onnxruntime.InferenceSession(tmp_path / "policy.onnx")
        assert_close(session.run(None, {"observations": observations})[0], expected)


@needs_a_compiler
@pytest.mark.parametrize(
    ("size", "stride", "padding"), [(3, 1, "SAME"), (4, 1, "SAME"), (5, 1, "VALID"), (3, 2, "VALID")]
)
def test_grids_may_be_convolved_in_other_ways_than_the_published_one(size, stride, padding, tmp_path):
    one = play_policy.count_outputs(10, size, stride, padding)  # pixels of a side after one convolution, and after two
    two = play_policy.count_outputs(one, size, stride, padding)
    kernels = (size, size, 6, 5), (size, size, 5, 2)
    for sparsity, shapes in itertools.product((0, 0.9), ([kernels[0], (one**2 * 5, 3)], [*kernels, (two**2 * 2, 3)])):
        strides = [stride] * (len(shapes) - 1)
        network = random_network("minatar", sparsity, shapes, strides, padding)
        export_c(policy_of(tmp_path / "policy.npz", network))
        observations = observations_of(network)
        observations[0] *= np.arange(1, 101, dtype=np.uint8).reshape(10, 10, 1)  # cells of other values than 0 and 1
        found = outputs_of(compile_c(tmp_path, *SANITIZERS), observations)
        assert_close(found, expected_of(network, observations))


@needs_a_compiler
def test_two_policies_live_in_one_program_and_may_have_the_name_of_a_keyword(tmp_path):
    networks = {"int": SMALL["minatar"](0.8), "Int": SMALL["mujoco"](0.5)}
    for name, network in networks.items():
        path = policy_of(tmp_path / "policy.npz", network)
        export_policy.main(Args(path, c=tmp_path / f"{network['world']}.h", name=name))
    (tmp_path / "example.c").write_text(
        '#include <stdio.h>\n#include "minatar.h"\n#include "mujoco.h"\n#include "minatar.h"\n'
        "int main(void) {\n  static uint8_t first[400]; static float second[11]; float q[3], a[3];\n"
        "  int_q_values(first, q); Int_action(second, a); int_q_values(first, q);\n"
        '  printf("%.9g %.9g %.9g\\n%.9g %.9g %.9g\\n", q[0], q[1], q[2], a[0], a[1], a[2]);\n  return 0;\n}\n'
    )
    expected = [expected_of(network, observations_of(network)[1:2])[0] for network in networks.values()]
    for compiler in (C, CPP):
        assert_close(outputs_of(compile_c(tmp_path, compiler=compiler), []), np.array(expected))


@needs_a_compiler
def test_a_header_that_nobody_calls_draws_no_warning(tmp_path):
    for make in SMALL.values():
        export_c(policy_of(tmp_path / "policy.npz", make(0.8)))
        (tmp_path / "example.c").write_text('#include "policy.h"\nint main(void) { return 0; }\n')
        for compiler in (C, CPP, [*C, "-O0"]):
            compile_c(tmp_path, compiler=compiler)


@needs_a_compiler
def test_numbers_survive_the_text_exactly(tmp_path):
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 5_000, dtype=np.uint32)
    x = np.append(bits.view(np.float32), np.float32([0, -0.0, 1, 2**24, 0.1, 1e-45, 3.4028235e38, 1.1754944e-38]))
    x = x[np.isfinite(x)]
    text = export_policy.array_text("x", x) + export_policy.array_text("n", np.uint32([0, 2**32 - 1]))
    assert np.array_equal(
        np.float32(re.findall(r"[-+.e\d]+(?=f)", text.split("{")[1])).view(np.uint32), x.view(np.uint32)
    )
    (tmp_path / "example.c").write_text(
        "#include <stdint.h>\n#include <stdio.h>\n#include <string.h>\n" + text + "int main(void) {\n"
        f"  for (int i = 0; i < {len(x)}; i++) {{ uint32_t y; memcpy(&y, x + i, 4);"
        '    printf("%lu\\n", (unsigned long)y); }\n'
        '  printf("%lu\\n", (unsigned long)n[1]);\n  return 0;\n}\n'
    )
    result = subprocess.run([compile_c(tmp_path)], capture_output=True, text=True, check=True)
    *found, last = map(int, result.stdout.split())
    assert found == x.view(np.uint32).tolist()
    assert last == 2**32 - 1


@needs_a_compiler
def test_a_network_with_no_weight_left_gives_its_biases(tmp_path):
    for make in (SMALL["atari"], SMALL["minatar"], SMALL["mujoco"]):
        network = make(0.5)
        for tensors in network["params"].values():
            tensors["kernel"] = np.zeros_like(tensors["kernel"])
        export_c(policy_of(tmp_path / "policy.npz", network))
        observations = observations_of(network)
        for flags in ([], SANITIZERS):
            assert_close(outputs_of(compile_c(tmp_path, *flags), observations), expected_of(network, observations))


@needs_a_compiler
def test_whatever_a_file_says_about_itself_stays_in_the_comment(tmp_path):
    path = minatar_policy(tmp_path / "policy.npz")

    def change(about, arrays):
        about["args"]["env_id"] = '*/ #error " \n \\ ??/\n é'
        for name in [x for x in arrays if "Dense_0" in x]:
            arrays[name.replace("Dense_0", "*/Dense_0")] = arrays.pop(name)
        about["layers"]["target"] = {
            name.replace("Dense_0", "*/Dense_0"): kind for name, kind in about["layers"]["target"].items()
        }

    export_c(change_policy(path, change))
    compile_c(tmp_path)
    assert (tmp_path / "policy.h").read_text().isascii()


@needs_a_compiler
@pytest.mark.parametrize(
    ("text", "n_lines", "error"),
    [
        ("", 0, ""),
        ("1 " * 800, 2, ""),
        ("1 " * 799, 1, "error: number 400 of the 10 * 10 * 4 of an observation is missing or no number\n"),
        ("1 x", 0, "error: number 2 of the 10 * 10 * 4 of an observation is missing or no number\n"),
        ("-", 0, "error: number 1 of the 10 * 10 * 4 of an observation is missing or no number\n"),
        ("1 " * 400 + "256", 1, "error: number 1 of an observation is not from 0 to 255\n"),
        ("0 -1", 0, "error: number 2 of an observation is not from 0 to 255\n"),
    ],
)
def test_the_program_reads_whole_observations_and_says_what_is_wrong(text, n_lines, error, tmp_path):
    export_c(minatar_policy(tmp_path / "policy.npz"))
    program = compile_c(tmp_path)
    result = subprocess.run([program], input=text, capture_output=True, text=True, check=False)
    assert (result.stdout.count("\n"), result.stderr, result.returncode) == (n_lines, error, 2 if error else 0)
    with open("/dev/full", "w") as full:
        result = subprocess.run([program], input=text, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    expected = "error: No space left on device\n" if n_lines else error
    assert (result.stderr, result.returncode) == (expected, 2 if expected else 0)


@needs_a_compiler
@pytest.mark.parametrize(("folder", "found"), [(".", "include"), ("link", "../../include")])
def test_the_program_finds_the_header_from_its_own_folder(folder, found, tmp_path):
    path = minatar_policy(tmp_path / "policy.npz")
    (tmp_path / "include").mkdir()
    (tmp_path / "two" / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to("two/deep")
    main = tmp_path / folder / "example.c"
    export_policy.main(Args(path, c=tmp_path / "include" / "my policy.h", main=main, name="Agent_7"))
    compile_c(tmp_path / folder)
    assert f'#include "{found}/my policy.h"' in main.read_text()


def declared_bytes(header, qualifier):
    sizes = {"float": 4, "uint8_t": 1, "uint16_t": 2, "uint32_t": 4}
    arrays = re.findall(rf"^{qualifier} (\w+) \w+\[(\d+)\](?: =|;)", header, re.MULTILINE)
    return sum(sizes[kind] * int(length) for kind, length in arrays)


@pytest.mark.parametrize("kind", SMALL)
def test_the_table_and_the_comments_count_what_is_there(kind, tmp_path, capsys):
    network = SMALL[kind](0.85)
    export_c(policy_of(tmp_path / "policy.npz", network))
    table, header = capsys.readouterr().out, (tmp_path / "policy.h").read_text()
    rows = dict(re.findall(r"^(Bytes [a-zA-Z ]*?|Weights needed)  +(\d.*)$", table, re.M))
    rows = {name: [int(x.replace(",", "")) for x in re.findall(r"[\d,]+", row)] for name, row in rows.items()}
    names = play_policy.layer_names(network["layers"])[: -1 if kind == "mujoco" else None]
    kernels = [network["params"][name]["kernel"] for name in names]
    n_biases = sum(len(network["params"][name]["bias"]) for name in names)
    assert rows["Bytes in the file"] == [len(header)]
    assert len({len(row) for row in table.splitlines()[2:-1]}) == 1  # columns line up
    assert rows["Bytes of constants"][0] == declared_bytes(header, "static const")
    assert rows["Bytes of RAM"][0] == declared_bytes(header, "static")
    assert rows["Weights needed"][1] == sum(x.size for x in kernels)
    assert rows["Weights needed"][0] <= sum(map(np.count_nonzero, kernels))
    assert 0 <= rows["Bytes of constants"][1] - 4 * (n_biases + sum(x.size for x in kernels)) <= 2 * 64 * 10 + 2000
    weights, flash, ram = (f"{rows[x][0]:,}" for x in ("Weights needed", "Bytes of constants", "Bytes of RAM"))
    assert f"{weights} of {rows['Weights needed'][1]:,} weights are needed" in header
    n_kept, n_all = play_policy.count_weights(network)
    assert f"The network has a sparsity of {1 - n_kept / n_all:.3f}.\n" in header  # as play_policy.py prints it
    assert f"Flash: {flash} bytes" in header
    assert f"RAM: {ram} bytes" in header


@pytest.mark.parametrize("sparsity", [0.0, 0.3, 0.5, 0.826, 0.95])
def test_a_layer_is_written_sparse_only_if_that_is_smaller(sparsity):
    for make in SMALL.values():
        for layer in export_policy.planar_layers(make(sparsity)):
            dense, sparse = (export_policy.count_bytes(export_policy.arrays_of(layer, x)) for x in (False, True))
            is_sparse, arrays = export_policy.best_arrays(layer)
            assert is_sparse == (sparse < dense)
            assert export_policy.count_bytes(arrays) == min(sparse, dense)
    hidden = export_policy.planar_layers(SMALL["minatar"](sparsity))[1]
    assert export_policy.best_arrays(hidden)[0] == (sparsity > 0.2)


def test_the_header_names_the_actions_of_minatar(tmp_path):
    import minatar

    words = {"n": "none", "l": "left", "u": "up", "r": "right", "d": "down", "f": "fire"}
    games = {"Asterix", "Breakout", "Freeway", "Seaquest", "SpaceInvaders"}
    assert set(export_policy.ACTIONS) == games
    for game in games:
        env = minatar.Environment(re.sub("(?<=[a-z])(?=[A-Z])", "_", game).lower())
        names = [words[env.env.action_map[i]] for i in env.minimal_action_set()]
        assert export_policy.ACTIONS[game].split(", ") == names
        path = policy_of(tmp_path / "policy.npz", grid_network(0.5, n_actions=len(names)))
        change_policy(path, lambda about, _, game=game: about["args"].update(env_id=game))
        export_policy.main(Args(path, c=tmp_path / "policy.h"))
        assert f"({', '.join(names)})" in (tmp_path / "policy.h").read_text()


def test_a_header_includes_what_it_uses_and_nothing_else(tmp_path):
    for kind, make in SMALL.items():
        export_c(policy_of(tmp_path / "policy.npz", make(0.9)))
        header = (tmp_path / "policy.h").read_text()
        others = ["math.h"] if kind == "mujoco" else ["string.h"] if kind == "atari" else []
        assert sorted(re.findall(r"#include <(.*)>", header)) == sorted(["stdint.h", *others])
        assert max(map(len, header.splitlines())) <= 180
        defined = re.findall(r"^static (?:inline |const )?\w+ (\w+)", header, re.MULTILINE)
        assert len(defined) > 5
        assert all(name.startswith("policy_") for name in defined)


# ---- ONNX ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("sparsity", [0.0, 0.95])
@pytest.mark.parametrize("kind", SMALL)
def test_onnx_runtime_gives_the_same_numbers(kind, sparsity, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    network = SMALL[kind](sparsity)
    export_policy.main(Args(policy_of(tmp_path / "policy.npz", network), onnx=tmp_path / "policy.onnx"))
    session, observations = onnxruntime.InferenceSession(tmp_path / "policy.onnx"), observations_of(network)
    for n in (1, 3):
        (found,) = session.run(None, {"observations": observations[:n]})
        assert_close(found, expected_of(network, observations[:n]))
    assert session.get_outputs()[0].name == ("action" if kind == "mujoco" else "q_values")


def test_without_onnx_the_message_says_what_to_install(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    path = minatar_policy(tmp_path / "policy.npz")
    assert refused(Args(path, onnx=tmp_path / "p.onnx"), capsys) == "error: --onnx needs a package: pip install onnx\n"


# ---- Errors ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({}, "there is nothing to write: give --c policy.h, --onnx policy.onnx or both"),
        (dict(main=Path("a.c")), "--main is written around a header: give --c policy.h, too"),
        (
            dict(c=Path("a.h"), name="7up"),
            "--name '7up' is no name in C: give letters, digits and _, with a letter first",
        ),
        (dict(c=Path("a.h"), name=""), "--name '' is no name in C"),
        (dict(c=Path("a.h"), name="crazy-climber"), "--name 'crazy-climber' is no name in C"),
        (dict(c=Path("a.h"), name="é"), "is no name in C"),
        (dict(c=Path("a.h"), name="a\n"), "is no name in C"),
        (dict(c=Path("a.h"), onnx=Path("folder.h/../a.h")), "--c and --onnx would be the same file, a.h"),
        (dict(onnx=Path("policy.npz")), "the policy and --onnx would be the same file, policy.npz"),
        (dict(c=Path('a".h'), main=Path("b.c")), """'a".h' cannot stand in C: """),
        (dict(c=Path("a.h"), main=Path("o*b/b.c")), "'o*b/b.c' cannot stand in C: "),
        (dict(c=Path("a??.h")), "'a??.h' cannot stand in C: "),
        (dict(c=Path("a\r.h")), "--c 'a\\r.h' cannot be printed: "),
        (dict(c=Path("a\udcff.h")), "--c 'a\\udcff.h' cannot be printed: "),  # bytes that are not UTF-8
        (dict(onnx=Path("a\udcff.onnx")), "--onnx 'a\\udcff.onnx' cannot be printed: "),
        (dict(c=Path("policy")), "--c policy must be a .h file, such as policy.h"),
        (dict(c=Path(".h")), "--c .h must be a .h file, such as policy.h"),
        (
            dict(c=Path("a.h"), main=Path("a.c"), name="folder"),
            "the program would be written over folder, which is none",
        ),
        (dict(c=Path("a.h"), main=Path("a.c"), name="LICENSE"), "the program would be written over LICENSE, which is"),
        (
            dict(c=Path("a.h"), main=Path("a.c"), onnx=Path("agent"), name="agent"),
            "--onnx and the program of --name would be the same file, agent",
        ),
        (dict(c=Path("a.h"), main=Path("mine.c")), "mine.c was not written by export_policy.py: remove it, or choose"),
        (dict(c=Path("mine.h")), "mine.h was not written by export_policy.py: remove it, or choose"),
        (dict(c=Path("a.h"), main=Path("policy")), "--main policy must be a .c file"),
        (dict(c=Path("nowhere/a.h")), "cannot write to nowhere: No such file or directory"),
        (dict(c=Path("a.h"), main=Path("nowhere/a.c")), "cannot write to nowhere: No such file or directory"),
        (dict(c=Path("a.h"), onnx=Path("/proc/a.onnx")), "cannot write to /proc: "),
        (dict(c=Path("folder.h")), "folder.h is a folder"),
        (dict(c=Path("pipe.h")), "pipe.h is a folder or a device"),
    ],
)
def test_mistakes_are_told_in_one_line_and_leave_nothing(flags, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = minatar_policy(Path("policy.npz"))
    for folder in ("folder.h", "folder", "o*b"):
        Path(folder).mkdir()
    os.mkfifo("pipe.h")
    for name in ("mine.c", "mine.h", "LICENSE"):
        Path(name).write_text("mine")
    before = {x: x.is_file() and x.read_bytes() for x in Path().rglob("*")}
    assert message in refused(Args(path, **flags), capsys)
    assert {x: x.is_file() and x.read_bytes() for x in Path().rglob("*")} == before


def test_the_policy_in_the_folder_of_a_run_is_not_overwritten(tmp_path, capsys):
    path = minatar_policy(tmp_path / "policy.npz")
    assert "would be the same file" in refused(Args(tmp_path, onnx=path), capsys)
    export_policy.main(Args(tmp_path, c=tmp_path / "policy.h"))


def test_damaged_and_foreign_files_are_refused(tmp_path, capsys):
    path = minatar_policy(tmp_path / "damaged.npz")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    text, empty, other = (tmp_path / f"{name}.npz" for name in ("text", "empty", "other"))
    text.write_text("hello")
    empty.touch()
    np.savez(other, about=json.dumps({"script": "eaudedqn_atari"}), x=np.ones(3))
    for foreign in (path, text, empty, other):
        error = refused(Args(foreign, c=tmp_path / "policy.h"), capsys)
        assert error == f"error: {foreign} is damaged, or it is not the policy.npz of a run\n"
    missing = tmp_path / "missing.npz"
    assert f"there is no {missing}: give" in refused(Args(missing, c=tmp_path / "policy.h"), capsys)
    assert not list(tmp_path.glob("policy.h*"))


def test_what_c_cannot_say_or_nobody_knows_is_refused(tmp_path, capsys):
    def refusal(change):
        path = change_policy(minatar_policy(tmp_path / "policy.npz"), change)
        return refused(Args(path, c=tmp_path / "policy.h"), capsys)

    def cut_off(about, arrays):
        for name in ("Dense_0", "Dense_1"):
            about["layers"]["target"].pop(name)
            arrays.pop(f"target/params/{name}/kernel")
            arrays.pop(f"target/params/{name}/bias")

    nan = refusal(lambda about, arrays: arrays.update({"target/params/Dense_1/bias": np.full(3, np.nan, np.float32)}))
    assert "layer Dense_1 of" in nan
    assert "has float32 weights that are not finite" in nan
    large = refusal(lambda about, arrays: arrays.update({"target/params/Dense_1/kernel": np.full((8, 3), 1e300)}))
    assert "has float64 weights that are not finite" in large
    assert "ends with Conv_0, a convolution: this exporter does not know" in refusal(cut_off)
    assert "this exporter does not know the world doom" in refusal(
        lambda about, _: about.update(script="eaudedqn_doom")
    )
    for name, shape in (("Dense_0", (300, 8)), ("Dense_1", ()), ("Conv_0", ()), ("Conv_0", (3, 3, 0, 4))):
        kernel = {f"target/params/{name}/kernel": np.ones(shape, np.float32)}
        assert "which does not fit here" in refusal(lambda about, arrays, kernel=kernel: arrays.update(kernel))
    assert not (tmp_path / "policy.h").exists()


def test_a_full_disk_leaves_the_file_before(tmp_path, capsys, monkeypatch):
    path, header = minatar_policy(tmp_path / "policy.npz"), tmp_path / "policy.h"
    header.write_text(export_policy.MARK)
    replace = Path.replace

    def fail(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    assert refused(Args(path, c=header), capsys) == f"error: cannot write {header}: No space left on device\n"
    monkeypatch.setattr(Path, "replace", replace)
    assert sorted(tmp_path.iterdir()) == [header, path]
    assert header.read_text() == export_policy.MARK


def test_nothing_but_the_outputs_is_touched(tmp_path, monkeypatch):
    folder = tmp_path / "o*b"  # does not get into C
    folder.mkdir()
    monkeypatch.chdir(folder)
    path, mine = minatar_policy(folder / "policy.npz"), folder / "q.h.tmp"
    mine.write_text("mine")
    for name in ("policy", "agent"):  # the second time over the files of the first
        export_policy.main(Args(path, c=Path("q.h"), main=Path("e.c"), onnx=folder / "*.onnx", name=name))
        assert {x.name for x in folder.iterdir()} == {"policy.npz", "q.h.tmp", "q.h", "e.c", "*.onnx"}
        assert f"{name}_q_values" in Path("e.c").read_text()
    assert mine.read_text() == "mine"


def test_a_link_stays_and_a_name_that_is_too_long_gets_one_line(tmp_path, capsys):
    path, link = minatar_policy(tmp_path / "policy.npz"), tmp_path / "q.h"
    link.symlink_to("real.h")
    for _ in range(2):  # it leads to nothing, then to a header
        export_policy.main(Args(path, c=link))
        assert link.is_symlink()
        assert "policy_q_values" in (tmp_path / "real.h").read_text()
    export_policy.main(Args(path, c=tmp_path / ("a" * 253 + ".h")))  # the longest name there is
    capsys.readouterr()
    assert "File name too long" in refused(Args(path, c=tmp_path / ("a" * 254 + ".h")), capsys)


def test_it_needs_neither_jax_nor_scipy_nor_a_game(tmp_path):
    code = (
        "import sys, export_policy; from pathlib import Path\n"
        "export_policy.main(export_policy.Args(Path(sys.argv[1]), c=Path(sys.argv[2])))\n"
        "print([x for x in ('jax', 'flax', 'scipy', 'gymnasium', 'ale_py', 'minatar', 'onnx') if x in sys.modules])"
    )
    path = policy_of(tmp_path / "policy.npz", SMALL["mujoco"](0.5))
    command = [sys.executable, "-c", code, path, tmp_path / "policy.h"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "[]"
    assert result.stderr == ""


def test_it_says_what_it_has_written_and_what_to_type_next(tmp_path, capsys):
    path = minatar_policy(tmp_path / "policy.npz")
    export_policy.main(Args(path, c=tmp_path / "a b.h", main=tmp_path / "e.c", onnx=tmp_path / "o.onnx", name="agent"))
    lines = capsys.readouterr().out.splitlines()
    for name in ("a b.h", "e.c", "o.onnx"):
        quoted = f"'{tmp_path / name}'" if " " in name else tmp_path / name
        assert f"Written: {quoted}, {(tmp_path / name).stat().st_size:,} bytes" in lines
    assert lines[-1] == f"cc -O3 -march=native {tmp_path / 'e.c'} -o agent -lm"


def test_help_lists_every_flag_with_its_text():
    environment = {**os.environ, "COLUMNS": "250"}
    command = [sys.executable, "export_policy.py", "--help"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, env=environment)
    for field in dataclasses.fields(Args):
        name = "PATH" if field.name == "path" else "--" + field.name.replace("_", "-")
        line = re.search(rf"^.*{name} .*$", result.stdout, re.MULTILINE)[0]
        assert len(re.findall(r"[a-z]{2,}", line)) > 4, line
