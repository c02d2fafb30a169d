//! `xdp-imds top` shows a node while its guests boot, and leaves the terminal as it was.

use std::io::{Read as _, Write as _};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use metadata_control::top::{BootStage, Top, VmPage, VmRow};
use support::agent::{self, Agent, PortArgument};
use support::eventually::eventually;
use support::guest::{Guest, METADATA, Spec};
use support::host::Host;
use support::privileged;
use support::process;
use support::record::Identity;

const PATIENCE: Duration = Duration::from_secs(20);

/// A node with a guest, whose record is there if it is `recorded`.
struct Scene {
    guest: Guest,
    host: Host,
    records: tempfile::TempDir,
}

impl Scene {
    fn new(recorded: bool) -> Self {
        let records = tempfile::tempdir().expect("a directory");
        let host = Host::new().expect("a node");
        let identity = Identity::of(0);
        if recorded {
            identity.write(records.path(), 1).expect("a record");
        }
        let guest = Guest::boot(&host, &Spec::of(&identity)).expect("a guest");
        Self { guest, host, records }
    }

    fn agent(&self) -> Agent<'_> {
        let port = PortArgument::new(self.guest.host_tap().name(), self.guest.identity().mac);
        Agent::start(self.host.ns(), self.records.path(), &[port]).expect("an agent")
    }

    fn top(&self, words: &[&str]) -> String {
        let Output { status, stdout, stderr } = top(&self.records.path().join("run"), words);
        assert!(status.success(), "{words:?}: {}", String::from_utf8_lossy(&stderr));
        String::from_utf8(stdout).expect("text")
    }

    fn document<T: serde::de::DeserializeOwned>(&self, words: &[&str]) -> T {
        let text = self.top(&[words, &["--json"]].concat());
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
    }

    /// The only VM of the node.
    fn row(&self) -> VmRow {
        let top: Top = self.document(&[]);
        assert_eq!(top.vms.len(), 1, "{top:?}");
        top.vms.into_iter().next().expect("a VM")
    }

    fn ask(&self, path: &str) {
        self.guest.curl(&[&format!("http://{METADATA}{path}")], PATIENCE).expect("an answer");
    }
}

fn top(run: &Path, words: &[&str]) -> Output {
    let mut command = Command::new(agent::binary().expect("the agent is built"));
    command.arg("top").args(words).arg("--run").arg(run).output().expect("the verb runs")
}

#[test]
fn a_boot_is_followed_from_the_first_request_to_the_last() {
    if !privileged::or_skip() {
        return;
    }
    let scene = Scene::new(true);
    let agent = scene.agent();
    let row = scene.row();
    assert_eq!((row.stage, row.requests, row.first, row.dialect), (BootStage::Silent, 0, None, None));
    assert_eq!(row.vm.as_ref(), Some(&scene.guest.identity().hostname));
    scene.ask("/v1/meta-data");
    scene.ask("/nowhere");
    let row = scene.row();
    assert_eq!((row.dialect.as_deref(), row.requests), (Some("nocloud"), 2), "{row:?}");
    assert_eq!((row.path.as_deref(), row.status), (Some("/nowhere"), Some(404)), "{row:?}");
    assert!(!row.has_user_data && row.first >= row.last, "{row:?}");
    scene.ask("/v1/user-data?token=hunter2");
    let name = scene.guest.identity().mac.to_string();
    let pages: Vec<VmPage> = scene.document(&[&name]);
    let paths: Vec<_> = pages[0].requests.iter().map(|request| (&*request.path, request.status)).collect();
    assert_eq!(paths, [("/v1/user-data", 200), ("/nowhere", 404), ("/v1/meta-data", 200)]);
    assert!(pages[0].row.has_user_data && pages[0].held.is_some(), "{pages:?}");
    let top: Top = scene.document(&[]);
    assert!(top.traffic.requests == 3 && top.traffic.per_second.is_some(), "{top:?}");
    let quiet = eventually(PATIENCE, || {
        anyhow::ensure!(scene.row().stage == BootStage::Quiet);
        Ok(())
    });
    quiet.expect("a guest without requests becomes quiet");
    let text = scene.top(&["--once"]);
    for part in ["xdp-imds ", " 1: 1 quiet", "nocloud", "/v1/user-data", "q quit"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(!text.contains('\x1b') && !text.contains("hunter2"), "{text}");
    agent.stop().expect("the agent stops");
}

#[test]
fn a_guest_whose_record_is_late_waits_for_it() {
    if !privileged::or_skip() {
        return;
    }
    let scene = Scene::new(false);
    let _agent = scene.agent();
    let url = format!("http://{METADATA}/v1/meta-data");
    let mac = scene.guest.identity().mac.to_string();
    std::thread::scope(|scope| {
        let asking = scope.spawn(|| scene.guest.curl(&[&url], PATIENCE));
        let held = eventually(PATIENCE, || {
            let pages: Vec<VmPage> = scene.document(&[&mac]);
            let held = pages[0].held.map_or(0, |held| held.requests);
            anyhow::ensure!(held == 1 || asking.is_finished(), "{pages:?}");
            Ok(pages)
        });
        let pages = held.expect("the request is held");
        assert_eq!(pages[0].row.stage, BootStage::Unrecorded);
        assert_eq!(pages[0].row.waits_for.as_deref(), Some("its record"));
        scene.guest.identity().write(scene.records.path(), 1).expect("a record");
        drop(asking.join().expect("no panic"));
    });
    let served = eventually(PATIENCE, || {
        let row = scene.row();
        anyhow::ensure!(row.stage != BootStage::Unrecorded, "{row:?}");
        Ok(())
    });
    served.expect("the record arrives");
}

#[test]
fn only_the_vms_that_match_a_filter_are_listed() {
    if !privileged::or_skip() {
        return;
    }
    let scene = Scene::new(true);
    let _agent = scene.agent();
    for (filter, matching) in [("SILENT", 1), ("nothing-is-called-so", 0), (scene.guest.host_tap().name(), 1)]
    {
        let top: Top = scene.document(&["--filter", filter, "--sort", "name", "--limit", "1"]);
        assert_eq!((top.matching, top.vms.len() as u64), (matching, matching), "{filter}");
        assert_eq!(top.stages.values().sum::<u64>(), 1, "counts are of the whole node");
    }
    let long = "x".repeat(300);
    let refused = top(&scene.records.path().join("run"), &["--json", "--filter", &long]);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && said.contains("256 bytes"), "{said}");
}

#[test]
fn without_an_agent_the_printed_forms_fail_with_a_remedy() {
    let run = tempfile::tempdir().expect("a directory");
    for words in [&["--once"][..], &["--json"], &[]] {
        let Output { status, stderr, .. } = top(run.path(), words);
        let said = String::from_utf8_lossy(&stderr);
        assert!(!status.success() && said.contains("xdp-imds serve"), "{words:?}: {said}");
    }
}

/// `xdp-imds top` in a terminal of 80 × 24 by script(1).
struct InTerminal {
    script: Child,
    room: tempfile::TempDir,
}

impl InTerminal {
    /// Starts the view in a run directory without an agent, and waits until it shows that there is none.
    fn start(run: &Path) -> Self {
        Self::start_after("", run)
    }

    /// Like [`start`](Self::start), after commands of the shell.
    fn start_after(prefix: &str, run: &Path) -> Self {
        let room = tempfile::tempdir().expect("a directory");
        let (agent, path) = (agent::binary().expect("the agent is built"), room.path().display());
        let text = format!(
            "{prefix}stty rows 24 cols 80; echo $$ > {path}/pid; TERM=xterm exec {} top --run {} --interval 0.2",
            agent.display(),
            run.display()
        );
        let mut script = Command::new("script");
        script.args(["--quiet", "--flush", "--return", "--command", &text, "/dev/null"]);
        let output = std::fs::File::create(room.path().join("output")).expect("a file");
        let script = script.stdin(Stdio::piped()).stdout(output).spawn().expect("script(1) of util-linux");
        let terminal = Self { script, room };
        terminal.wait_for(AWAY, 1);
        terminal
    }

    /// Waits until the terminal got a text this often.
    fn wait_for(&self, part: &str, times: usize) {
        let shown = eventually(PATIENCE, || {
            let text = self.text();
            anyhow::ensure!(text.matches(part).count() >= times, "{text:?}");
            Ok(())
        });
        shown.expect(part);
    }

    fn text(&self) -> String {
        let mut bytes = Vec::new();
        let file = std::fs::File::open(self.room.path().join("output"));
        file.and_then(|mut file| file.read_to_end(&mut bytes)).expect("what the terminal got");
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Waits for the end; returns the exit code and what the terminal got.
    fn end(mut self) -> (Option<i32>, String) {
        let ended = eventually(PATIENCE, || {
            self.script.try_wait()?.ok_or_else(|| anyhow::anyhow!("the view has not ended"))
        });
        (ended.expect("an end").code(), self.text())
    }
}

impl Drop for InTerminal {
    fn drop(&mut self) {
        let _ = self.script.kill();
        let _ = self.script.wait();
    }
}

/// The notice of the last line.
const AWAY: &str = "The agent is away";
/// Changes to the alternate screen and back (ctlseqs of xterm, `1049`).
const ENTER: &str = "\x1b[?1049h";
const LEAVE: &str = "\x1b[?1049l";

#[test]
fn q_and_sigterm_leave_the_terminal_as_it_was() {
    for by_key in [true, false] {
        let run = tempfile::tempdir().expect("a directory");
        let mut terminal = InTerminal::start(run.path());
        if by_key {
            terminal.script.stdin.as_mut().expect("a pipe").write_all(b"q").expect("a key");
        } else {
            let pid = std::fs::read_to_string(terminal.room.path().join("pid")).expect("a PID");
            process::terminate(pid.trim().parse().expect("a PID")).expect("a process");
        }
        let keys = terminal.script.stdin.take();
        let (code, text) = terminal.end();
        drop(keys);
        assert_eq!(code, Some(0), "{text:?}");
        let (enter, leave) = (text.find(ENTER), text.rfind(LEAVE));
        assert!(enter.is_some() && enter < leave, "{text:?}");
    }
}

#[test]
fn the_view_ends_with_its_terminal_also_if_it_ignores_the_signal() {
    for prefix in ["", "trap '' HUP; "] {
        let run = tempfile::tempdir().expect("a directory");
        let mut terminal = InTerminal::start_after(prefix, run.path());
        let pid = std::fs::read_to_string(terminal.room.path().join("pid")).expect("a PID");
        terminal.script.kill().expect("it runs");
        terminal.script.wait().expect("it ends");
        let ended = eventually(PATIENCE, || {
            // Whoever inherits the process may leave it a zombie.
            let status = std::fs::read_to_string(format!("/proc/{}/status", pid.trim())).unwrap_or_default();
            anyhow::ensure!(status.is_empty() || status.contains("\nState:\tZ"), "{status}");
            Ok(())
        });
        ended.expect(prefix);
    }
}

#[test]
fn the_view_finds_an_agent_that_starts_and_says_when_it_is_gone() {
    if !privileged::or_skip() {
        return;
    }
    let scene = Scene::new(true);
    let terminal = InTerminal::start(&scene.records.path().join("run"));
    let agent = scene.agent();
    terminal.wait_for("serving", 1);
    terminal.wait_for(&scene.guest.identity().hostname, 1);
    agent.stop().expect("the agent stops");
    terminal.wait_for(AWAY, 2);
}
