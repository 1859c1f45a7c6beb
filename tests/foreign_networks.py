"""Networks of CleanRL, written from their well-known structure."""

import torch
from torch import nn
from torch.nn import functional


class ResidualBlock(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv0 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x):
        return self.conv1(functional.relu(self.conv0(functional.relu(x)))) + x


class ConvSequence(nn.Module):
    def __init__(self, channels, out):
        super().__init__()
        self.conv = nn.Conv2d(channels, out, 3, padding=1)
        self.res_block0, self.res_block1 = ResidualBlock(out), ResidualBlock(out)

    def forward(self, x):
        x = functional.max_pool2d(self.conv(x), kernel_size=3, stride=2, padding=1)
        return self.res_block1(self.res_block0(x))


class CleanAgent(nn.Module):
    """The network of CleanRL's ppo_procgen, which reads frames (N, H, W, C) from 0 to 255."""

    def __init__(self, actions=15):
        super().__init__()
        self.network = nn.Sequential(
            ConvSequence(3, 16), ConvSequence(16, 32), ConvSequence(32, 32), nn.Flatten(),
            nn.ReLU(), nn.Linear(2048, 256), nn.ReLU())
        self.actor, self.critic = nn.Linear(256, actions), nn.Linear(256, 1)

    def forward(self, x):
        hidden = self.network(x.permute(0, 3, 1, 2) / 255.0)
        return self.actor(hidden), self.critic(hidden)


class CleanLstmAgent(nn.Module):
    """The network of CleanRL's ppo_atari_lstm, on frames of Procgen."""

    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(
            nn.Conv2d(3, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(),
            nn.Conv2d(64, 64, 3, 1), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 512), nn.ReLU())
        self.lstm = nn.LSTM(512, 20)
        self.actor, self.critic = nn.Linear(20, 15), nn.Linear(20, 1)

    def forward(self, images, state):
        output, (h, c) = self.lstm(self.network(images)[None],
                                   tuple(part[None].contiguous() for part in state.chunk(2, -1)))
        return self.actor(output[0]), self.critic(output[0]), torch.cat([h[0], c[0]], -1)


def seeded(module, scale=0.05):
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=scale)
    return module
