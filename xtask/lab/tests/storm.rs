//! A small boot storm as users run it: guests of three clouds boot at once, every answer is checked, and none fails.

use std::io::Write as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use support::eventually;
use support::packages::{Packages, With};
use support::{agent, privileged, vhost};

/// Options of every test.
const SMALL: [&str; 5] = ["storm", "--rounds", "1", "--subjects", "xdp-imds"];

/// The number of guests in small storms. Zero seconds give a single wave of boots.
const FEW: [&str; 4] = ["--vms", "32", "--seconds", "0"];

/// Runs a storm on the agent and reads the results that it wrote.
fn storm(more: &[&str]) -> serde_json::Value {
    run(&[&SMALL[..], more].concat())
}

fn run(words: &[&str]) -> serde_json::Value {
    let directory = tempfile::tempdir().expect("a directory");
    let json = directory.path().join("storm.json");
    let mut command = Command::new(env!("CARGO_BIN_EXE_xdp-imds-lab"));
    command.args(words).arg("--json").arg(&json);
    command.arg("--agent").arg(agent::binary().expect("the agent is built"));
    let output = command.output().expect("the storm runs");
    let messages = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}\n{messages}", output.status);
    serde_json::from_slice(&std::fs::read(&json).expect("the results")).expect("JSON")
}

/// Returns the requests answered correctly and those that failed, for each case.
fn outcomes(results: &serde_json::Value) -> Vec<(u64, u64)> {
    let cases = results["cases"].as_array().expect("cases");
    let round = |case: &serde_json::Value| case["subjects"][0]["rounds"][0].clone();
    let count = |round: &serde_json::Value, what: &str| round[what].as_u64().expect("a number");
    cases.iter().map(round).map(|round| (count(&round, "requests"), count(&round, "failures"))).collect()
}

#[privileged::test]
fn guests_of_every_cloud_boot_at_once_without_a_failure() {
    let results = storm(&FEW);
    assert_eq!(outcomes(&results), [(32 * 4, 0), (32 * 48, 0), (32 * 46, 0)]);
}

#[test]
fn guests_behind_vhost_net_boot_at_once_without_a_failure() {
    if !vhost::or_skip() {
        return;
    }
    let results = storm(&[&FEW[..], &["--dialect", "nocloud", "--vhost"]].concat());
    assert_eq!(outcomes(&results), [(32 * 4, 0)]);
    assert_eq!(results["cases"][0]["settings"]["options"]["vhost"], "yes");
}

#[test]
fn a_storm_behind_vhost_net_ends_with_a_remedy_where_there_is_none() {
    if vhost::missing().is_none() {
        return;
    }
    let mut command = Command::new(env!("CARGO_BIN_EXE_xdp-imds-lab"));
    let output = command.args(SMALL).args(FEW).arg("--vhost").output().expect("the storm ends");
    let messages = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{messages}");
    for words in ["--vhost needs vhost-net", vhost::DEVICE, "modprobe vhost_net"] {
        assert!(messages.contains(words), "no `{words}` in {messages}");
    }
}

#[privileged::test]
fn guests_with_loss_slow_reads_or_checksum_offload_boot_without_a_failure() {
    for more in [
        &["--loss", "0.02"][..],
        &["--slow-readers", "2", "--user-data", "64KiB"],
        &["--vnet-hdr"],
        &["--keep-alive"],
        &["--arrival", "poisson:500"],
    ] {
        let results = storm(&[&FEW[..], &["--dialect", "nocloud"], more].concat());
        assert_eq!(outcomes(&results), [(32 * 4, 0)], "{more:?}");
    }
}

#[privileged::test]
fn after_a_killed_agent_nothing_published_is_missed_and_nothing_former_is_served() {
    let file = tempfile::NamedTempFile::new().expect("a file");
    let limits = "limits: {frames_per_second: 0, connections_per_second: 0}";
    let config = format!("answer_requests_in_kernel: true\nanswer_without_agent_seconds: 600\n{limits}\n");
    std::fs::write(file.path(), config).expect("a file");
    let config = ["--agent-config", file.path().to_str().expect("text")];
    let killed = ["--vms", "32", "--dialect", "nocloud", "--seconds", "1.5", "--kill-after", "0.5"];
    let results = storm(&[&killed[..], &config].concat());
    let round = &results["cases"][0]["subjects"][0]["rounds"][0];
    let count = |what: &str| round["without_agent"][what].as_u64().expect("a number");
    assert_eq!((count("waiting"), count("missed"), round["failures"].as_u64()), (0, 0, Some(0)), "{round}");
    assert!(count("answered") > 0, "{round}");
}

#[privileged::test]
fn a_recorded_storm_shows_its_guests_and_what_they_found() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("storm.cast");
    let record = ["--dialect", "nocloud", "--arrival", "ramp:2", "--record", file.to_str().expect("text")];
    assert_eq!(outcomes(&storm(&[&FEW[..], &record].concat())), [(32 * 4, 0)]);
    let text = std::fs::read_to_string(&file).expect("a recording");
    for part in ["\"version\":2", "VMs       32", "guest-", "nocloud", "/v1/"] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

/// The guests of this storm check every byte of what both agents say, and both ask the same Nova.
#[test]
fn guests_get_the_same_bytes_from_neutrons_agent_as_from_ours() {
    let missing = privileged::missing().map(str::to_owned).or_else(shell::tools::missing_peers);
    if !privileged::or_skip_for(missing.as_deref())
        || Packages::or_skip("bookworm", &["hostname"], With::Nothing).is_none()
    {
        return;
    }
    let both = ["storm", "--rounds", "1", "--subjects", "xdp-imds-nova,neutron"];
    let few = ["--vms", "4", "--networks", "2", "--seconds", "0", "--dialect", "openstack"];
    let results = run(&[&both[..], &few].concat());
    let subjects = results["cases"][0]["subjects"].as_array().expect("subjects");
    let rounds: Vec<_> = subjects.iter().map(|subject| &subject["rounds"][0]).collect();
    assert_eq!(rounds.len(), 2, "{results}");
    for round in &rounds {
        assert_eq!(
            (round["requests"].as_u64(), round["failures"].as_u64()),
            (Some(4 * 48), Some(0)),
            "{round}"
        );
    }
    assert_eq!(rounds[1]["asked_of_nova"], 4 * 48, "Neutron's agent asks for each answer");
}

/// Limit on each wait for the view.
const PATIENCE: Duration = Duration::from_secs(120);

/// A long storm that somebody watches in a terminal, by script(1).
struct Watched {
    script: Child,
    room: tempfile::TempDir,
}

impl Watched {
    fn start() -> Result<Self> {
        let room = tempfile::tempdir()?;
        std::fs::create_dir(room.path().join("tmp"))?;
        let (lab, agent, at) = (env!("CARGO_BIN_EXE_xdp-imds-lab"), agent::binary()?, room.path().display());
        let words =
            [&SMALL[..], &FEW, &["--dialect", "nocloud", "--arrival", "ramp:600", "--watch"]].concat();
        let text = format!(
            "stty rows 24 cols 80; echo $$ > {at}/pid; TERM=xterm TMPDIR={at}/tmp exec {lab} {} --agent {}",
            words.join(" "),
            agent.display()
        );
        let mut script = Command::new("script");
        script.args(["--quiet", "--flush", "--return", "--command", &text, "/dev/null"]);
        let output = std::fs::File::create(room.path().join("output"))?;
        let script =
            script.stdin(Stdio::piped()).stdout(output).spawn().context("script(1) of util-linux")?;
        let watched = Self { script, room };
        eventually(PATIENCE, || {
            let shown = String::from_utf8_lossy(&std::fs::read(watched.path("output"))?).into_owned();
            ensure!(shown.contains("asking"), "no guest is shown yet: {shown:?}");
            Ok(())
        })?;
        Ok(watched)
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.room.path().join(name)
    }

    /// Waits until the storm has ended; whoever inherits its process may leave it a zombie.
    fn ended(&self) -> Result<()> {
        let pid = std::fs::read_to_string(self.path("pid"))?;
        eventually(PATIENCE, || {
            let status = std::fs::read_to_string(format!("/proc/{}/status", pid.trim())).unwrap_or_default();
            ensure!(status.is_empty() || status.contains("\nState:\tZ"), "{status}");
            Ok(())
        })
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        let _ = self.script.kill();
        let _ = self.script.wait();
    }
}

/// Returns the command lines of processes that name a path.
fn processes_that_name(path: &Path) -> Result<Vec<String>> {
    let path = path.display().to_string();
    let files = std::fs::read_dir("/proc")?.filter_map(|entry| Some(entry.ok()?.path().join("cmdline")));
    let lines = files.filter_map(|file| Some(std::fs::read_to_string(file).ok()?.replace('\0', " ")));
    Ok(lines.filter(|line| line.contains(&path)).collect())
}

#[privileged::test]
fn a_watched_storm_that_is_interrupted_leaves_neither_agent_nor_files() {
    for closes in [false, true] {
        let mut watched = Watched::start().expect("a storm in its view");
        let temporary = watched.path("tmp");
        assert_ne!(processes_that_name(&temporary).expect("processes"), [""; 0], "the agent runs");
        if closes {
            watched.script.kill().expect("it runs");
        } else {
            watched.script.stdin.as_mut().expect("a pipe").write_all(b"\x03").expect("Ctrl-C");
        }
        watched.ended().expect("an end");
        // `script`, whose command line has the path too, ends a moment later.
        let none = eventually(PATIENCE, || {
            let named = processes_that_name(&temporary)?;
            ensure!(named.is_empty(), "{named:?}");
            Ok(())
        });
        none.unwrap_or_else(|error| panic!("closes: {closes}: {error}"));
        let left: Vec<_> = std::fs::read_dir(&temporary).expect("a directory").collect();
        assert!(left.is_empty(), "closes: {closes}: {left:?}");
    }
}

#[privileged::test]
fn a_takeover_disturbs_no_request_and_a_killed_agent_fails_none() {
    for event in ["takeover@0.3", "kill9@0.3"] {
        let vms = ["--vms", "64", "--seconds", "0", "--dialect", "openstack", "--arrival", "ramp:1"];
        let results = storm(&[&vms[..], &["--event", event]].concat());
        let round = &results["cases"][0]["subjects"][0]["rounds"][0];
        let count = |what: &str| round[what].as_u64().expect("a number");
        assert_eq!((count("failures"), &round["events"][0]["event"]), (0, &event.into()), "{event}: {round}");
        assert_eq!(count("requests"), 64 * 48, "{event}: {round}");
        if event.starts_with("takeover") {
            assert_eq!((count("retries"), &round["reasons"]), (0, &serde_json::json!({})), "{event}");
        }
    }
}

#[privileged::test]
fn one_guest_that_floods_makes_no_other_fail() {
    let results = storm(&[&FEW[..], &["--dialect", "nocloud", "--flood", "syn"]].concat());
    assert_eq!(outcomes(&results), [(32 * 4, 0)]);
}

#[privileged::test]
fn silent_guests_cost_little_memory_and_less_cpu_time_than_one_boot() {
    let results = storm(&["--vms", "100,600", "--seconds", "0", "--dialect", "openstack", "--idle", "5"]);
    let rounds: Vec<_> =
        (0..2).map(|case| results["cases"][case]["subjects"][0]["rounds"][0].clone()).collect();
    let number = |value: &serde_json::Value| value.as_f64().expect("a number");
    let [few, many] = [0, 1].map(|case: usize| number(&rounds[case]["memory"]["server_bytes"]));
    // All dialects of a VM take about 30 kB. Its record, its tables and the allocator's share are added to this.
    let each = (many - few) / 500.0;
    assert!(each < 64.0 * 1024.0, "{each} bytes for each further VM");
    let idle = number(&rounds[1]["idle"]["server_us"]);
    let boots = ["server_user_us", "server_system_us"].map(|what| number(&rounds[1]["cpu"][what]));
    assert!(idle < boots.iter().sum(), "{idle} µs without requests, {boots:?} µs to boot");
}

#[test]
fn pve_imds_without_its_program_is_refused_with_the_option_that_names_it() {
    for more in [&[][..], &["--pve-imds", "/absent"]] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_xdp-imds-lab"));
        let output =
            command.args(["storm", "--subjects", "pve-imds"]).args(more).output().expect("an answer");
        let messages = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && messages.contains("--pve-imds FILE"), "{more:?}: {messages}");
    }
}
