//! Where things are on a host, for scripts and messages alike.

/// The agent.
pub(crate) const BINARY: &str = "/usr/local/bin/xdp-imds";
/// The previous agent, and during a load the next one.
pub(crate) const LIB: &str = "/usr/local/lib/xdp-imds";
/// The configuration.
pub(crate) const CONFIG: &str = "/etc/xdp-imds/config.yaml";
/// The directory of records that the default configuration names.
const RECORDS: &str = "/etc/xdp-imds/records.d";
/// Keys, what guests wrote, and the last records.
pub(crate) const STATE: &str = "/var/lib/xdp-imds";
/// Sockets.
const RUN: &str = "/run/xdp-imds";
/// Where systemd runs: the service and its unit.
pub(crate) const SERVICE: &str = "xdp-imds";
pub(crate) const UNIT: &str = "/etc/systemd/system/xdp-imds.service";
/// The service that runs the new agent while the old one's service is replaced, and its unit.
pub(crate) const BRIDGE: &str = "xdp-imds-next";
const BRIDGE_UNIT: &str = "/run/systemd/system/xdp-imds-next.service";
/// Elsewhere: the file with the agent's process id, and its log.
pub(crate) const PID_FILE: &str = "/run/xdp-imds.pid";
pub(crate) const LOG: &str = "/var/log/xdp-imds.log";

/// The line that tells a unit of this verb from one that somebody else wrote.
const MARK: &str = "Written by cargo xtask load";

/// The unit of the Debian package, which starts another binary.
const PACKAGED_UNIT: &str = include_str!("../../../deploy/systemd/xdp-imds.service");
/// The start of the agent in that unit.
const PACKAGED_START: &str = "ExecStart=/usr/bin/xdp-imds serve ";
/// What that unit does after a failure.
const PACKAGED_RESTART: &str = "Restart=on-failure\n";

/// Returns the assignments that precede a script.
pub(crate) fn assignments() -> String {
    let places = [
        ("binary", BINARY),
        ("lib", LIB),
        ("config", CONFIG),
        ("records", RECORDS),
        ("state", STATE),
        ("run", RUN),
        ("service", SERVICE),
        ("unit", UNIT),
        ("bridge", BRIDGE),
        ("bridge_unit", BRIDGE_UNIT),
        ("pidfile", PID_FILE),
        ("log", LOG),
        ("mark", MARK),
    ];
    places.map(|(name, value)| format!("{name}='{value}'\n")).concat()
}

/// Returns the unit of the service. Its agent takes over from one that runs.
pub(crate) fn unit() -> String {
    unit_of(BINARY)
}

/// Returns the unit of the bridge. If its agent fails, it is not tried again: the next try would take the ports again.
pub(crate) fn bridge_unit() -> String {
    unit_of(&format!("{LIB}/next/xdp-imds")).replace(PACKAGED_RESTART, "Restart=no\n")
}

fn unit_of(binary: &str) -> String {
    let start = format!("ExecStart={binary} serve --takeover ");
    format!("# {MARK}.\n{}", PACKAGED_UNIT.replace(PACKAGED_START, &start))
}

#[cfg(test)]
mod tests {
    use super::{BINARY, CONFIG, LIB, bridge_unit, unit};

    /// The lines of a unit that say what starts, and what happens when it fails.
    fn life(unit: &str) -> Vec<&str> {
        unit.lines().filter(|line| line.starts_with("ExecStart=") || line.starts_with("Restart=")).collect()
    }

    #[test]
    fn each_unit_starts_its_binary_which_takes_over() {
        let start = |binary: &str| format!("ExecStart={binary} serve --takeover --config {CONFIG}");
        assert_eq!(life(&unit()), [start(BINARY).as_str(), "Restart=on-failure"]);
        let bridge = start(&format!("{LIB}/next/xdp-imds"));
        assert_eq!(life(&bridge_unit()), [bridge.as_str(), "Restart=no"]);
        assert!(!unit().contains("/usr/bin/"), "{}", unit());
    }
}
