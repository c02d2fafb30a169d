//! What an operator meets on the first day: a log that is there, and messages that name the cause.

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use metadata_common::mac::Mac;
use metadata_control::status::AgentStatus;
use support::agent::{self, Agent, PortArgument};
use support::eventually;
use support::guest::{Guest, METADATA, Spec};
use support::host::Host;
use support::privileged;
use support::record::Identity;

const PATIENCE: Duration = Duration::from_secs(20);

/// Runs a verb without the environment's settings of the log.
fn run(words: &[&str], variables: &[(&str, &str)]) -> Output {
    let mut command = Command::new(agent::binary().expect("the agent is built"));
    for variable in ["XDP_IMDS_LOG", "XDP_IMDS_LOG_FORMAT", "JOURNAL_STREAM"] {
        command.env_remove(variable);
    }
    command.envs(variables.iter().copied()).args(words).output().expect("the verb runs")
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn a_word_that_is_no_log_level_is_refused_wherever_it_is_written() {
    let room = tempfile::tempdir().expect("a directory");
    let (records, file) = (room.path().display().to_string(), room.path().join("config.yml.txt"));
    Identity::of(0).write(room.path(), 1).expect("a record");
    let levels = "off, error, warn, info, debug, trace";
    for word in ["verbose", "warnings", "metadata_steer", ""] {
        for output in [
            run(&["--log", word, "check", &records], &[]),
            run(&["check", &records], &[("XDP_IMDS_LOG", word)]),
        ] {
            let text = said(&output);
            assert_eq!(output.status.code(), Some(2), "{word}: {text}");
            assert!(text.contains(levels), "{word}: {text}");
        }
        let output = run(&["check", &records], &[("XDP_IMDS_LOG", word)]);
        assert!(said(&output).contains("environment variable XDP_IMDS_LOG"), "{word}: {}", said(&output));
        let output = run(&["check", &records, "--log", "info"], &[("XDP_IMDS_LOG", word)]);
        assert!(output.status.success(), "{word}: the option counts: {}", said(&output));
        let output = run(&["--log", word, "check", &records], &[("XDP_IMDS_LOG", "info")]);
        assert!(!said(&output).contains("environment variable"), "{word}: {}", said(&output));
        fs::write(&file, format!("records: {records}\nlog: \"{word}\"\n")).expect("written");
        let output = run(&["serve", "--config", &file.display().to_string()], &[]);
        let text = said(&output);
        assert!(output.status.code() == Some(1) && text.contains(levels), "{word}: {text}");
    }
    for word in ["warning", "warn", "WARN", "info,metadata_steer=warning"] {
        let output = run(&["--log", word, "check", &records], &[]);
        assert_eq!(output.status.code(), Some(0), "{word}: {}", said(&output));
    }
}

#[test]
fn the_first_line_names_version_configuration_sources_and_listeners() {
    let room = tempfile::tempdir().expect("a directory");
    let file = room.path().join("config.yaml");
    let path = |name: &str| room.path().join(name).display().to_string();
    let text = format!(
        "records: {}\napi: {{}}\nrun: {}\nstate: null\npins: null\nmetrics: 127.0.0.1:9\n",
        path("records"),
        path("run")
    );
    fs::write(&file, text).expect("written");
    fs::create_dir(path("records")).expect("a directory");
    // Without this capability it cannot serve, on any machine.
    let serve = |words: &[&str]| {
        let mut command = Command::new("setpriv");
        command.args(["--bounding-set=-net_admin", "--inh-caps=-net_admin"]);
        command.arg(agent::binary().expect("the agent is built")).args(words);
        command.args(["serve", "--config"]).arg(&file).env_remove("XDP_IMDS_LOG_FORMAT");
        let output = command.env_remove("JOURNAL_STREAM").stdin(Stdio::null()).output().expect("it runs");
        String::from_utf8_lossy(&output.stderr).lines().next().unwrap_or_default().to_owned()
    };
    let expected = [
        ("version", agent_version()),
        ("configuration", file.display().to_string()),
        ("sources", format!("{}, the API", path("records"))),
        ("listeners", format!("{}/control.sock, http://127.0.0.1:9/metrics", path("run"))),
    ];
    let plain = serve(&[]);
    assert!(plain.contains("INFO xdp-imds starts "), "{plain}");
    for (name, value) in &expected {
        assert!(plain.contains(&format!("{name}={value}")), "no {name}={value} in: {plain}");
    }
    let json = serve(&["--log-format", "json"]);
    let line: serde_json::Value =
        serde_json::from_str(&json).unwrap_or_else(|error| panic!("{error}: {json}"));
    assert_eq!((line["message"].as_str(), line["level"].as_str()), (Some("xdp-imds starts"), Some("info")));
    for (name, value) in &expected {
        assert_eq!(line["fields"][*name].as_str(), Some(value.as_str()), "{json}");
    }
    let journal = serve(&["--log-format", "journal"]);
    assert!(journal.starts_with("<6>INFO xdp-imds starts "), "{journal}");
}

fn agent_version() -> String {
    let output = run(&["--version"], &[]);
    String::from_utf8_lossy(&output.stdout).trim().trim_start_matches("xdp-imds ").to_owned()
}

/// Runs a verb of a node's agent. Returns its exit code and what it printed.
fn ask(directory: &Path, words: &[&str]) -> (Option<i32>, String) {
    let run_directory = directory.join("run").display().to_string();
    let output = run(&[words, &["--run", &run_directory]].concat(), &[]);
    let text = [output.stdout, output.stderr].concat();
    (output.status.code(), String::from_utf8_lossy(&text).into_owned())
}

#[privileged::test]
fn a_mac_that_no_record_has_is_named_with_its_port_and_record() {
    let (host, records) = (Host::new().expect("a node"), tempfile::tempdir().expect("a directory"));
    let identity = Identity::of(0);
    identity.write(records.path(), 1).expect("a record");
    let (mac, right) = (Mac([0x52, 0x54, 0, 0xba, 0xdb, 0xad]), identity.mac.to_string());
    let guest = Guest::boot(&host, &Spec { mac, ..Spec::of(&identity) }).expect("a guest");
    let port = guest.host_tap().name().to_owned();
    let wanted = PortArgument::new(port.clone(), identity.mac);
    let agent = Agent::start(host.ns(), records.path(), &[wanted]).expect("an agent");
    let problem =
        format!("{port}: frames from MAC {mac} are dropped, because guest-0.yaml expects {right} there");

    let look = || -> Result<AgentStatus> {
        // Each try sends frames again.
        let url = format!("http://{METADATA}/v1/meta-data");
        _ = guest.curl(&[&url], Duration::from_secs(1));
        let (code, text) = ask(records.path(), &["status", "--json"]);
        let status: AgentStatus = serde_json::from_str(&text).with_context(|| text.clone())?;
        ensure!(status.troubles.iter().any(|line| line.starts_with(&problem)), "{:?}", status.troubles);
        ensure!(code == Some(1), "exit code {code:?}");
        Ok(status)
    };
    let status = eventually(PATIENCE, look).unwrap_or_else(|error| panic!("{error:#}\n{}", agent.log()));
    assert_eq!(status.mac_mismatches.len(), 1, "{:?}", status.mac_mismatches);
    for name in [mac.to_string(), right.clone(), port.clone(), identity.hostname.clone()] {
        let (code, text) = ask(records.path(), &["status", &name]);
        assert!(code == Some(1) && text.contains(&problem), "{name}: {text}");
    }
    for name in [mac.to_string(), port.clone()] {
        let (_, text) = ask(records.path(), &["trace", &name, "--seconds", "1"]);
        assert!(text.contains(&format!("problem: {problem}")), "{name}: {text}");
    }
    assert!(agent.eventually_logs(&problem), "{}", agent.log());
    assert!(!agent.log().contains("log.target"), "{}", agent.log());
    assert_eq!(agent.log().matches(&problem).count(), 1, "it is logged once:\n{}", agent.log());

    let path = records.path().join("run").display().to_string();
    let words = ["doctor", "--json", "--no-pins", "--run", &path, "--port", &port];
    let binary = agent::binary().expect("the agent is built");
    let output = host.ns().output(Command::new(binary).args(words)).expect("doctor runs");
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).expect("a report");
    let checks = report["checks"].as_array().expect("checks");
    let check = checks.iter().find(|check| check["name"] == "port.mac").expect("a check of the MAC");
    assert_eq!(
        (check["subject"].as_str(), check["status"].as_str()),
        (Some(&*port), Some("warn")),
        "{check}"
    );
    for word in [mac.to_string(), format!("guest-0.yaml expects {right}")] {
        assert!(check.to_string().contains(&word), "no {word} in {check}");
    }
}

#[privileged::test]
fn each_counter_of_the_status_is_in_the_book() {
    let (host, records) = (Host::new().expect("a node"), tempfile::tempdir().expect("a directory"));
    let _agent = Agent::start(host.ns(), records.path(), &[]).expect("an agent");
    let (_, text) = ask(records.path(), &["status", "--json"]);
    let status: AgentStatus = serde_json::from_str(&text).expect("a status");
    let page = include_str!("../../docs/src/operate/observe.md");
    for name in status.counters.keys() {
        assert!(page.contains(&format!("| `{name}` |")), "{name} is not in docs/src/operate/observe.md");
    }
    assert!(status.counters.contains_key("frames_without_hub"), "{:?}", status.counters);
}
