//! Where a running agent is found.

/// The run directory, unless the configuration or `--run` names another.
pub const DEFAULT_RUN: &str = "/run/xdp-imds";
/// Name of the control socket in the run directory.
pub const SOCKET: &str = "control.sock";
