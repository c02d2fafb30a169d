//! Tests of single scripts, in a directory that stands for a host without systemd.

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use crate::plan;

/// A temporary directory that stands for the root of a host.
struct Node {
    root: tempfile::TempDir,
}

impl Node {
    fn new() -> Self {
        Self { root: tempfile::tempdir().expect("a directory") }
    }

    /// The path of one of the host's files below that directory.
    fn at(&self, place: &str) -> PathBuf {
        self.root.path().join(place.trim_start_matches('/'))
    }

    /// Writes a program or another file.
    fn write(&self, place: &str, text: &str) {
        let path = self.at(place);
        fs::create_dir_all(path.parent().expect("a directory")).expect("a directory");
        fs::write(&path, text).expect("a file");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("a program");
    }

    /// Runs a script; returns whether it succeeds, and what it says on both outputs.
    fn run(&self, text: &str, words: &[&str], input: &str) -> (bool, String) {
        let root = self.root.path().display();
        let places = plan::assignments().replace("='/", &format!("='{root}/"));
        let common = include_str!("scripts/common.sh");
        let text = format!("exec 2>&1\n{places}{common}has_systemd() {{ return 1; }}\n{text}");
        let mut shell = Command::new("sh");
        shell.args(["-c", &text, "sh"]).args(words).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = shell.spawn().expect("a shell");
        // A script that reads nothing may have closed the pipe already.
        drop(child.stdin.take().expect("a pipe").write_all(input.as_bytes()));
        let output = child.wait_with_output().expect("an end");
        (output.status.success(), String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Runs a script, asserts that it succeeds, and returns its output.
    fn runs(&self, text: &str, words: &[&str], input: &str) -> String {
        let (succeeds, said) = self.run(text, words, input);
        assert!(succeeds, "{text}\n{said}");
        said
    }

    /// Copies an agent and a configuration, as the first steps of a load do.
    fn stage(&self, agent: &str, kind: &str) {
        self.runs(include_str!("scripts/stage.sh"), &[&agent.len().to_string()], agent);
        self.runs(include_str!("scripts/stage_config.sh"), &[kind], "api: {}\n");
    }

    /// Runs the step after a failure; returns what it says. The agent before is process `pid`.
    fn undo(&self, pid: &str) -> String {
        self.runs(include_str!("scripts/undo.sh"), &[pid, "1", "1"], "")
    }

    /// All files with their contents, and all directories.
    fn tree(&self) -> String {
        let root = self.root.path().display();
        self.runs(&format!("cd '{root}'; find . | sort; grep -r '' . | sort"), &[], "")
    }
}

/// A program that does nothing, in the agent's place.
const AGENT: &str = "#!/bin/sh\n# one\n";
/// Another one.
const OTHER: &str = "#!/bin/sh\n# two\n";

#[test]
fn a_load_goes_on_if_all_that_doctor_refuses_is_what_a_new_agent_mends() {
    let closed = "FAIL  agent.closed: no agent runs, and programs of one that has ended close 2 taps";
    let detached = "FAIL  agent.attachments: 2 eBPF programs were detached by another program";
    for (pid, lines, code, goes_on, shown, hidden) in [
        ("", "ok    tun: one", 0, true, "", "tun"),
        ("7", "warn  clock: 1970\nwarn  agent: an agent (process 7) runs", 0, true, "clock", "process 7"),
        ("", closed, 1, true, "the new one takes them", "FAIL"),
        ("", &format!("warn  clock: 1970\n{closed}"), 1, true, "clock", "FAIL"),
        ("", &format!("{closed}\nFAIL  tun: none"), 1, false, "FAIL  tun: none", "agent.closed"),
        ("", "FAIL  tun: none", 1, false, "FAIL  tun: none", "the new one takes them"),
        ("", "FAIL  tun agent.closed: none", 1, false, "the host cannot serve yet", "the new one takes them"),
        // An agent runs, but not with this configuration's run directory.
        ("7", closed, 1, false, "FAIL  agent.closed", "the new one takes them"),
        ("7", detached, 1, true, "FAIL  agent.attachments", "cannot serve"),
        (
            "7",
            &format!("warn  agent: an agent runs\n{detached}"),
            1,
            true,
            "restores what it can",
            "an agent runs",
        ),
        ("7", &format!("{detached}\nFAIL  tun: none"), 1, false, "FAIL  agent.attachments", "restores"),
        ("", detached, 1, false, "FAIL  agent.attachments", "restores"),
        // Doctor did not come to its end.
        ("", closed, 101, false, "the host cannot serve yet", "the new one takes them"),
        ("", "error: no such option", 1, false, "no such option", "the new one takes them"),
    ] {
        let node = Node::new();
        let agent = format!("#!/bin/sh\ncat <<'END'\n{lines}\nEND\nexit {code}\n");
        node.write(&format!("{}/next/xdp-imds", plan::LIB), &agent);
        let (succeeds, said) = node.run(include_str!("scripts/doctor.sh"), &["config.yaml", pid], "");
        assert_eq!(succeeds, goes_on, "{pid:?} {lines}: {said}");
        assert!(said.contains(shown) && !said.contains(hidden), "{pid:?} {lines}: {said}");
    }
}

#[test]
fn a_load_that_fails_leaves_what_was_there_before() {
    type Prepare = fn(&Node);
    let cases: [(&str, Prepare); 6] = [
        ("nothing", |_| {}),
        ("an agent that a load has put there", |node| {
            node.write(plan::BINARY, AGENT);
            fs::create_dir_all(node.at(plan::LIB)).expect("a directory");
        }),
        ("its previous binary", |node| node.write(&format!("{}/previous", plan::LIB), AGENT)),
        ("an empty directory of the configuration", |node| {
            fs::create_dir_all(node.at("/etc/xdp-imds")).expect("a directory");
        }),
        ("a configuration", |node| node.write(plan::CONFIG, "hub: a\n")),
        ("two configurations", |node| {
            node.write(plan::CONFIG, "hub: a\n");
            node.write(&format!("{}.previous", plan::CONFIG), "hub: b\n");
        }),
    ];
    for (name, prepare) in cases {
        for (kind, is_in_place) in [("given", false), ("given", true), ("default", false), ("default", true)]
        {
            let node = Node::new();
            for directory in ["/etc", "/usr/local/lib"] {
                fs::create_dir_all(node.at(directory)).expect("a directory");
            }
            prepare(&node);
            let before = node.tree();
            node.stage(OTHER, kind);
            if is_in_place {
                node.runs(include_str!("scripts/configure.sh"), &[], "");
            }
            assert_eq!(node.undo(""), "nothing was changed\n", "{name}, {kind}");
            assert_eq!(node.tree(), before, "{name}, {kind}, {is_in_place}");
        }
    }
}

#[test]
fn a_host_whose_load_was_interrupted_is_as_before_after_one_that_fails() {
    let node = Node::new();
    fs::create_dir_all(node.at("/usr/local/lib")).expect("a directory");
    let before = node.tree();
    node.stage(AGENT, "given");
    node.stage(OTHER, "given");
    node.undo("");
    assert_eq!(node.tree(), before);
}

#[test]
fn an_agent_is_said_to_serve_only_if_it_runs() {
    let own = std::process::id().to_string();
    // No process has this number.
    for (pid, expected) in [
        (own.as_str(), "nothing was changed; the agent that ran before still serves\n"),
        ("0", "nothing was changed\n"),
        ("", "nothing was changed\n"),
    ] {
        let node = Node::new();
        node.stage(AGENT, "given");
        assert_eq!(node.undo(pid), expected, "{pid:?}");
    }
}

#[test]
fn a_load_keeps_the_binary_before_only_if_it_differs() {
    for (present, kept, said) in [
        (None, None, ""),
        (Some(OTHER), Some(OTHER), "the binary before is now"),
        (Some(AGENT), None, "does not become"),
    ] {
        let node = Node::new();
        if let Some(present) = present {
            node.write(plan::BINARY, present);
        }
        node.stage(AGENT, "given");
        let printed = node.runs(include_str!("scripts/place.sh"), &[], "");
        assert!(printed.contains(said) && printed.is_empty() == said.is_empty(), "{present:?}: {printed}");
        assert_eq!(fs::read_to_string(node.at(plan::BINARY)).expect("a binary"), AGENT);
        let previous = fs::read_to_string(node.at(&format!("{}/previous", plan::LIB)));
        assert_eq!(previous.ok().as_deref(), kept, "{present:?}");
    }
}

#[test]
fn a_rollback_goes_back_to_the_binary_before_the_one_that_runs() {
    // A load may fail after the takeover and before the new binary is in place.
    for (is_in_place, expected) in [(true, OTHER), (false, AGENT)] {
        let node = Node::new();
        let next = format!("{}/next/xdp-imds", plan::LIB);
        node.write(plan::BINARY, AGENT);
        node.write(&format!("{}/previous", plan::LIB), OTHER);
        node.write(&next, "");
        // A program that runs until its standard input ends.
        fs::copy("/bin/sh", node.at(&next)).expect("an agent");
        if is_in_place {
            fs::copy("/bin/sh", node.at(plan::BINARY)).expect("a binary");
        }
        let mut agent = Command::new(node.at(&next));
        let mut agent = agent.args(["-c", "read -r _; :"]).stdin(Stdio::piped()).spawn().expect("a process");
        node.write(plan::PID_FILE, &format!("{}\n", agent.id()));
        let facts = node.runs(include_str!("scripts/facts.sh"), &[], "");
        node.runs(include_str!("scripts/stage_previous.sh"), &[], "");
        drop(agent.stdin.take());
        agent.wait().expect("its end");
        assert!(facts.contains("\nprevious="), "{is_in_place}: {facts}");
        assert_eq!(fs::read_to_string(node.at(&next)).expect("a binary"), expected, "{is_in_place}");
    }
}

#[test]
fn a_load_keeps_the_configuration_before_only_if_it_differs() {
    let previous = format!("{}.previous", plan::CONFIG);
    // A load that failed after this step, and is run again, finds its own configuration in place.
    for (present, kept, said) in [("hub: a\n", "hub: a\n", ""), ("api: {}\n", "hub: b\n", "does not become")]
    {
        let node = Node::new();
        node.write(plan::CONFIG, present);
        node.write(&previous, "hub: b\n");
        node.stage(AGENT, "given");
        let printed = node.runs(include_str!("scripts/configure.sh"), &[], "");
        assert!(printed.contains(said) && printed.is_empty() == said.is_empty(), "{present:?}: {printed}");
        let text = |place: &str| fs::read_to_string(node.at(place)).expect("a configuration");
        assert_eq!([text(plan::CONFIG), text(&previous)], ["api: {}\n", kept], "{present:?}");
        // A failure later on leaves both as they were.
        node.undo("");
        assert_eq!([text(plan::CONFIG), text(&previous)], [present, "hub: b\n"], "{present:?}");
    }
}

#[test]
fn a_host_is_known_by_its_pid_file_after_its_agent_has_ended() {
    let node = Node::new();
    let facts = || node.runs(include_str!("scripts/facts.sh"), &[], "");
    let has = |printed: String, name: &str| printed.lines().any(|line| line.starts_with(name));
    assert!(!has(facts(), "pidfile="));
    // This process runs, but is no agent.
    node.write(plan::PID_FILE, &format!("{}\n", std::process::id()));
    assert!(has(facts(), "pidfile=yes"));
    assert!(!has(facts(), "pid="));
}

#[test]
fn taps_are_opened_after_a_first_load_whose_agent_has_ended() {
    let node = Node::new();
    let told = node.at("/told");
    node.stage(&format!("#!/bin/sh\necho \"$@\" >> '{}'\n", told.display()), "given");
    // The start of the agent has left this.
    node.write(&format!("{}/next/started", plan::LIB), "");
    let said = node.undo("");
    assert!(said.contains("the new one does not serve"), "{said}");
    assert!(node.runs(include_str!("scripts/facts.sh"), &[], "").contains("lib=yes"));
    node.runs(include_str!("scripts/unload.sh"), &["1"], "");
    assert_eq!(fs::read_to_string(told).expect("words"), "--version\nrelease\n");
    assert!(!node.at(plan::LIB).exists());
}
