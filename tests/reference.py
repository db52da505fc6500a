"""Independent NumPy versions, in double precision, of what the scripts compute with JAX."""

import numpy as np


def convolve(x, kernel, bias, stride):
    """`SAME` convolution of (batch, height, width, channels), written from its definition."""
    size, out = kernel.shape[0], -(-x.shape[1] // stride)
    padding = (out - 1) * stride + size - x.shape[1]
    x = np.pad(x, [(0, 0), (padding // 2, padding - padding // 2), (padding // 2, padding - padding // 2), (0, 0)])
    result = np.zeros((len(x), out, out, kernel.shape[3]))
    for row in range(size):
        for column in range(size):
            patch = x[:, row : row + out * stride : stride, column : column + out * stride : stride][:, :out, :out]
            result += patch @ kernel[row, column]
    return result + bias


def q_values(params, observations):
    """(batch, 4, 84, 84) uint8 -> (batch, n_actions)."""
    layers = {name: (np.float64(p["kernel"]), np.float64(p["bias"])) for name, p in params["params"].items()}
    x = observations.transpose(0, 2, 3, 1) / 255.0
    for i, stride in enumerate((4, 2, 1)):
        x = np.maximum(convolve(x, *layers[f"Conv_{i}"], stride), 0)
    kernel, bias = layers["Dense_0"]
    x = np.maximum(x.reshape(len(x), -1) @ kernel + bias, 0)
    kernel, bias = layers["Dense_1"]
    return x @ kernel + bias


def dqn_targets(target_params, batch, gamma):
    return batch.rewards + gamma * np.where(batch.terminals, 0, q_values(target_params, batch.frames[:, 1:]).max(1))


def dqn_loss(params, batch, targets):
    values = q_values(params, batch.frames[:, :-1])[np.arange(len(targets)), batch.actions]
    return np.mean((targets - values) ** 2)


def cql_loss(params, batch, targets, alpha):
    values = q_values(params, batch.frames[:, :-1])
    chosen = values[np.arange(len(targets)), batch.actions]
    return np.mean((targets - chosen) ** 2) + alpha * np.mean(np.log(np.exp(values).sum(1)) - chosen)


def finite_difference(loss, params, layer, name, index, delta=1e-5):
    """d loss / d params[layer][name][index]."""
    values = []
    for sign in (1, -1):
        tensor = np.float64(params["params"][layer][name])  # a copy
        tensor[index] += sign * delta
        values.append(loss({"params": {**params["params"], layer: {**params["params"][layer], name: tensor}}}))
    return (values[0] - values[1]) / (2 * delta)


def adam(gradients, learning_rate, epsilon):
    """The change of a weight at the last of a series of gradients."""
    first = second = 0.0
    for gradient in gradients:
        first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
    n = len(gradients)
    return -learning_rate * (first / (1 - 0.9**n)) / (np.sqrt(second / (1 - 0.999**n)) + epsilon)
