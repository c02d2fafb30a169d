//! Paths at which clients find a running agent.

/// The default run directory; the configuration or `--run` overrides it.
pub const DEFAULT_RUN: &str = "/run/xdp-imds";
/// Name of the control socket in the run directory.
pub const SOCKET: &str = "control.sock";
