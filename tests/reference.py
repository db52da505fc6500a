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


# ---- SAC: values, losses and their gradients by hand, for trees of flax's Dense layers ----


def forward(layers, x):
    """Activations of Dense layers with ReLU between them; the last is the output."""
    activations = [np.float64(x)]
    for i, layer in enumerate(layers):
        x = activations[-1] @ np.float64(layer["kernel"]) + np.float64(layer["bias"])
        activations.append(x if i == len(layers) - 1 else np.maximum(x, 0))
    return activations


def backward(layers, activations, slopes):
    """Gradients of the layers and of the input, where `slopes` are those of the output."""
    gradients = []
    for i, layer in reversed(list(enumerate(layers))):
        gradients.insert(0, {"kernel": activations[i].T @ slopes, "bias": slopes.sum(axis=0)})
        slopes = slopes @ np.float64(layer["kernel"]).T
        slopes = slopes * (activations[i] > 0) if i else slopes
    return gradients, slopes


def dense_layers(params):
    return [params["params"][f"Dense_{i}"] for i in range(len(params["params"]))]


def dense_tree(layers):
    return {"params": {f"Dense_{i}": layer for i, layer in enumerate(layers)}}


def critic_values(params, observations, actions):
    return forward(dense_layers(params), np.concatenate([observations, actions], axis=1))[-1][:, 0]


def critic_gradients(params, observations, actions, targets):
    """Loss of one critic, mean of (y - Q(s, a))^2, and its gradients."""
    layers = dense_layers(params)
    activations = forward(layers, np.concatenate([observations, actions], axis=1))
    errors = activations[-1][:, 0] - targets
    return np.mean(errors**2), dense_tree(backward(layers, activations, 2 * errors[:, None] / len(errors))[0])


def policy(params, observations, noise):
    """Actions and log-probabilities of a tanh Gaussian, from the change of variables."""
    *hidden, mean_layer, log_std_layer = dense_layers(params)
    mean = forward([*hidden, mean_layer], observations)[-1]
    log_std = np.clip(forward([*hidden, log_std_layer], observations)[-1], -20, 2)
    actions = np.tanh(mean + np.exp(log_std) * noise)
    densities = np.exp(-(noise**2) / 2) / np.sqrt(2 * np.pi) / np.exp(log_std) / (1 - actions**2)
    return actions, np.log(densities).sum(axis=1)


def sac_targets(actor, critics, batch, noise, temperature, gamma):
    """y = r + gamma (min Q(s', a') - alpha log pi(a' | s')), where `critics` are the two chosen targets."""
    actions, log_probs = policy(actor, batch.next_observations, noise)
    values = np.min([critic_values(critic, batch.next_observations, actions) for critic in critics], axis=0)
    return batch.rewards + gamma * np.where(batch.terminals, 0, values - temperature * log_probs)


def actor_gradients(actor, critics, observations, noise, temperature):
    """Loss of the actor, mean of alpha log pi(a | s) - min Q(s, a), its gradients, and the entropy."""
    *hidden, mean_layer, log_std_layer = dense_layers(actor)
    actions, log_probs = policy(actor, observations, noise)
    inputs = np.concatenate([observations, actions], axis=1)
    values = np.array([critic_values(critic, observations, actions) for critic in critics])
    q_slopes = np.zeros_like(actions)
    for i, critic in enumerate(critics):
        layers = dense_layers(critic)
        slopes = (values.argmin(axis=0) == i)[:, None].astype(float)
        q_slopes += backward(layers, forward(layers, inputs), slopes)[1][:, -actions.shape[1] :]

    activations = forward(hidden + [log_std_layer], observations)
    log_std = activations[-1]
    clipped = (log_std < -20) | (log_std > 2)
    std = np.exp(np.clip(log_std, -20, 2))
    # log pi falls with log(1 - tanh(x)^2), whose slope is -2 tanh(x), and directly with log std.
    x_slopes = (temperature * 2 * actions - q_slopes * (1 - actions**2)) / len(actions)
    std_slopes = np.where(clipped, 0, x_slopes * std * noise - temperature / len(actions))
    by_mean, _ = backward([*hidden, mean_layer], [*activations[:-1], None], x_slopes)
    by_std, _ = backward([*hidden, log_std_layer], activations, std_slopes)
    both = [{name: by_mean[i][name] + by_std[i][name] for name in ("kernel", "bias")} for i in range(len(hidden))]
    loss = np.mean(temperature * log_probs - values.min(axis=0))
    return loss, dense_tree([*both, by_mean[-1], by_std[-1]]), -np.mean(log_probs)
