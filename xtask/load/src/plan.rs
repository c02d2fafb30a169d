//! The steps of a load and of an unload, from what a host has and what is asked for. Nothing here runs.

use std::path::PathBuf;

use crate::facts::{Facts, Input, Script};

/// How long a previous agent may take to end: 30 s for its guests (`DRAIN_LIMIT`), and a margin. Also how long an agent
/// may take after SIGTERM, as in its unit.
const ENDS_WITHIN: u32 = 45;

#[derive(Clone, Debug)]
pub(crate) struct HostStep {
    /// What it does, for progress and dry runs.
    pub(crate) says: String,
    pub(crate) script: Script,
}

/// The steps of a load.
#[derive(Clone, Debug, Default)]
pub(crate) struct LoadPlan {
    /// The steps up to the takeover. If one fails, the host is as before.
    pub(crate) before: Vec<HostStep>,
    /// The steps after it. If one fails, somebody has to decide.
    pub(crate) after: Vec<HostStep>,
}

/// Where the new binary comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// A file of this host and its size in bytes; `None` in a dry run, which builds nothing.
    File(Option<(PathBuf, u64)>),
    /// The binary before the present one, on the host.
    Previous,
}

/// What is asked for.
#[derive(Clone, Debug)]
pub(crate) struct Wanted {
    pub(crate) source: Source,
    /// A configuration to put in place; `None` keeps the host's, or makes one on a host that has none.
    pub(crate) config: Option<String>,
    /// How long the new agent may take to become ready, in seconds.
    pub(crate) ready_within: u32,
}

/// The configuration of a host that has none and is given none.
const DEFAULT_CONFIG: &str = "\
# The configuration of xdp-imds, written by cargo xtask load. Omitted fields have their defaults. The chapter
# Configuration of the book describes each field; SIGHUP applies changes.

# The directory has one file for each VM.
records: /etc/xdp-imds/records.d
";

fn step(says: impl Into<String>, text: &'static str, words: &[&str], input: Input) -> HostStep {
    let words = words.iter().map(|&word| word.to_owned()).collect();
    HostStep { says: says.into(), script: Script { text, words, input } }
}

/// Returns the steps of a load.
pub(crate) fn load(facts: &Facts, wanted: &Wanted) -> LoadPlan {
    let ready = wanted.ready_within.to_string();
    let mut plan = LoadPlan { before: vec![stage(&wanted.source)], after: Vec::new() };
    let config = match &wanted.config {
        Some(text) => Some((text.clone(), "given")),
        None => (!facts.config).then(|| (DEFAULT_CONFIG.to_owned(), "default")),
    };
    let staged = format!("{LIB}/next/config.yaml");
    let used = if config.is_some() { staged.as_str() } else { CONFIG };
    let is_new = config.is_some();
    if let Some((text, kind)) = config {
        let says = format!("copy the {kind} configuration to {LIB}/next");
        plan.before.push(step(says, include_str!("scripts/stage_config.sh"), &[kind], Input::Text(text)));
    }
    let says = "ask the new agent's doctor whether this host can serve".to_owned();
    let pid = pid(facts);
    plan.before.push(step(says, include_str!("scripts/doctor.sh"), &[used, &pid], Input::Nothing));
    if is_new {
        // As with the binary, the script says which case it is.
        let kept = if facts.config {
            format!("; if the present one differs, it becomes {CONFIG}.previous")
        } else {
            "".into()
        };
        let says = format!("put the configuration in place as {CONFIG}{kept}");
        plan.before.push(step(says, include_str!("scripts/configure.sh"), &[], Input::Nothing));
    }
    if facts.systemd {
        by_systemd(&mut plan, facts, &ready)
    } else {
        by_process(&mut plan, facts, &ready)
    }
    plan.after.push(status());
    plan
}

/// The step that shows the agent's state.
fn status() -> HostStep {
    step("show its status", include_str!("scripts/status.sh"), &[], Input::Nothing)
}

/// Returns the process of the agent that runs; empty if none does.
fn pid(facts: &Facts) -> String {
    facts.pid.map(|pid| pid.to_string()).unwrap_or_default()
}

fn stage(source: &Source) -> HostStep {
    let to = format!("{LIB}/next");
    match source {
        Source::Previous => {
            let says = format!("copy the binary before the present one to {to}");
            step(says, include_str!("scripts/stage_previous.sh"), &[], Input::Nothing)
        }
        Source::File(file) => {
            let (says, size, input) = match file {
                Some((path, size)) => {
                    let says = format!("copy {} ({} KiB) to {to}", path.display(), size >> 10);
                    (says, *size, Input::File(path.clone()))
                }
                None => (format!("copy the agent to {to}"), 0, Input::Nothing),
            };
            step(says, include_str!("scripts/stage.sh"), &[&size.to_string()], input)
        }
    }
}

/// The steps with systemd. A unit runs one agent at a time, so a second unit takes over first, and the first unit with
/// the new binary takes over from that one.
fn by_systemd(plan: &mut LoadPlan, facts: &Facts, ready: &str) {
    let ends = ENDS_WITHIN.to_string();
    if facts.active {
        let unit = Input::Text(bridge_unit());
        let says = format!("start it as {BRIDGE}; it takes over from {SERVICE} and becomes ready");
        plan.before.push(step(says, include_str!("scripts/bridge.sh"), &[ready], unit));
        let says = "wait until the previous agent has served its connections and ended";
        plan.after.push(step(says, include_str!("scripts/await_service.sh"), &[&ends], Input::Nothing));
    }
    plan.after.push(place(facts));
    let says = format!("put the unit in place as {UNIT}, and enable it");
    let unit = Input::Text(unit());
    plan.after.push(step(says, include_str!("scripts/unit.sh"), &[], unit));
    let from = if facts.active { format!("; it takes over from {BRIDGE}") } else { String::new() };
    let says = format!("start {SERVICE}{from}, and wait until it is ready");
    plan.after.push(step(says, include_str!("scripts/start.sh"), &[ready], Input::Nothing));
    let says = format!("remove {BRIDGE} and {LIB}/next");
    plan.after.push(step(says, include_str!("scripts/end_bridge.sh"), &[&ends], Input::Nothing));
}

/// The steps without systemd. The agent becomes a process of its own.
fn by_process(plan: &mut LoadPlan, facts: &Facts, ready: &str) {
    let from =
        if facts.runs() { "; it takes over and becomes ready" } else { ", and wait until it is ready" };
    let says = format!("start it detached, with {PID_FILE} and {LOG}{from}");
    plan.before.push(step(says, include_str!("scripts/detach.sh"), &[ready], Input::Nothing));
    plan.after.push(place(facts));
    if let Some(pid) = facts.pid {
        let says = "wait until the previous agent has served its connections and ended";
        let words = [ENDS_WITHIN.to_string(), pid.to_string()];
        let words = [words[0].as_str(), &words[1]];
        plan.after.push(step(says, include_str!("scripts/await_process.sh"), &words, Input::Nothing));
    }
    let says = format!("remove {LIB}/next");
    plan.after.push(step(says, include_str!("scripts/finish.sh"), &[], Input::Nothing));
}

fn place(facts: &Facts) -> HostStep {
    // A plan does not know the bytes of both; the script says which case it is.
    let kept = if facts.version.is_some() {
        format!("; if the present one differs, it becomes {LIB}/previous")
    } else {
        "".into()
    };
    let says = format!("put the binary in place as {BINARY}{kept}");
    step(says, include_str!("scripts/place.sh"), &[], Input::Nothing)
}

/// Returns the step after a failure before the end of the takeover.
pub(crate) fn undo(facts: &Facts, wanted: &Wanted) -> HostStep {
    let words = [pid(facts), ENDS_WITHIN.to_string(), wanted.ready_within.to_string()];
    let words = words.each_ref().map(String::as_str);
    step("remove what was copied", include_str!("scripts/undo.sh"), &words, Input::Nothing)
}

/// Returns the steps of an unload; none if there is nothing to do.
pub(crate) fn unload(facts: &Facts, purge: bool) -> Vec<HostStep> {
    let mut steps = Vec::new();
    // Otherwise whatever runs there is somebody else's.
    if facts.is_loaded {
        let what = if facts.systemd { format!("{SERVICE} and its unit") } else { "the agent".into() };
        let says = format!("stop {what}, open the taps, remove {BINARY}, {LIB} and the pins");
        let words = [ENDS_WITHIN.to_string()];
        steps.push(step(says, include_str!("scripts/unload.sh"), &[&words[0]], Input::Nothing));
    }
    if purge {
        let says = format!("remove configuration, records, {STATE} and {LOGS}");
        steps.push(step(says, include_str!("scripts/purge.sh"), &[], Input::Nothing));
    }
    steps
}

// Where things are on a host, for scripts and messages alike.

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
/// Audit logs and the files of sinks. The unit makes it.
const LOGS: &str = "/var/log/xdp-imds";
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
        ("logs", LOGS),
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
    use std::process::Command;

    use super::{BINARY, CONFIG, HostStep, LIB, LoadPlan, Source, Wanted, bridge_unit, load, unit, unload};
    use crate::facts::{Facts, Input};

    fn wanted(source: Source, config: Option<&str>) -> Wanted {
        Wanted { source, config: config.map(Into::into), ready_within: 60 }
    }

    fn lines(steps: &[HostStep]) -> Vec<&str> {
        steps.iter().map(|step| step.says.split([' ', ';', ',']).next().unwrap_or_default()).collect()
    }

    fn facts(systemd: bool, runs: bool) -> Facts {
        let version = runs.then(|| "xdp-imds 0.1.0".to_owned());
        let pid = runs.then_some(77);
        Facts { systemd, active: runs && systemd, config: runs, version, pid, ..Facts::default() }
    }

    #[test]
    fn an_agent_is_replaced_only_after_the_doctor_agrees() {
        for (systemd, runs) in [(false, false), (false, true), (true, false), (true, true)] {
            for source in [Source::File(None), Source::Previous] {
                let LoadPlan { before, after } = load(&facts(systemd, runs), &wanted(source, None));
                let all: Vec<_> = before.iter().chain(&after).collect();
                let at = |word: &str| all.iter().position(|step| step.says.contains(word));
                let doctor = at("doctor").expect("a doctor");
                for later in ["start it", "put the binary", "put the configuration", "unit in place"] {
                    assert!(at(later).is_none_or(|at| at > doctor), "{later}: {systemd} {runs}");
                }
                assert!(doctor < before.len(), "{systemd} {runs}");
                assert_eq!(all.last().map(|step| step.says.as_str()), Some("show its status"));
            }
        }
    }

    #[test]
    fn a_service_that_runs_is_replaced_by_way_of_a_second_one() {
        let plan = load(&facts(true, true), &wanted(Source::Previous, None));
        assert_eq!(lines(&plan.before), ["copy", "ask", "start"]);
        assert_eq!(lines(&plan.after), ["wait", "put", "put", "start", "remove", "show"]);
        let fresh = load(&facts(true, false), &wanted(Source::Previous, None));
        assert!(fresh.before.iter().chain(&fresh.after).all(|step| !step.says.starts_with("start it as")));
    }

    #[test]
    fn a_host_without_a_configuration_gets_one_and_a_given_one_replaces_the_present_one() {
        for (has, given, expected) in [
            (false, None, Some("records: /etc/xdp-imds/records.d")),
            (false, Some("api: {}"), Some("api: {}")),
            (true, Some("api: {}"), Some("api: {}")),
            (true, None, None),
        ] {
            let facts = Facts { config: has, ..Facts::default() };
            let plan = load(&facts, &wanted(Source::Previous, given));
            let text = plan.before.iter().find_map(|step| match &step.script.input {
                Input::Text(text) => Some(text.as_str()),
                _ => None,
            });
            let found = text.is_some_and(|text| expected.is_some_and(|expected| text.contains(expected)));
            assert_eq!(found, expected.is_some(), "{has} {given:?}: {text:?}");
        }
    }

    #[test]
    fn a_binary_is_said_to_be_kept_only_if_it_differs() {
        for (has, expected) in
            [(true, "; if the present one differs, it becomes /usr/local/lib/xdp-imds/previous"), (false, "")]
        {
            let facts = Facts { version: has.then(|| "xdp-imds 0.1.0".into()), ..Facts::default() };
            let expected = format!("put the binary in place as {BINARY}{expected}");
            assert_eq!(super::place(&facts).says, expected);
        }
    }

    #[test]
    fn only_what_a_load_has_put_there_is_unloaded() {
        for (is_loaded, purge, expected) in [
            (true, false, &["stop"][..]),
            (true, true, &["stop", "remove"]),
            (false, true, &["remove"]),
            (false, false, &[]),
        ] {
            let facts = Facts { is_loaded, ..facts(true, true) };
            assert_eq!(lines(&unload(&facts, purge)), expected, "{is_loaded} {purge}");
        }
    }

    #[test]
    fn every_script_is_valid() {
        let mut steps = unload(&Facts { is_loaded: true, ..facts(true, true) }, true);
        for (systemd, runs) in [(false, true), (true, true), (false, false)] {
            let plan = load(&facts(systemd, runs), &wanted(Source::File(None), Some("api: {}")));
            steps.extend([plan.before, plan.after].concat());
        }
        steps.push(super::undo(&facts(true, true), &wanted(Source::Previous, None)));
        for step in steps {
            let mut shell = Command::new("sh");
            shell.args(["-n", "-c"]).arg(format!(
                "{}{}",
                include_str!("scripts/common.sh"),
                step.script.text
            ));
            let output = shell.output().expect("a shell");
            assert!(output.status.success(), "{}: {output:?}", step.says);
        }
    }

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
