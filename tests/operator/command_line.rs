//! What scripts and shells see of the command: exit codes, closed pipes, help, JSON and messages.

use anyhow::ensure;
use metadata_control::status::{AgentStatus, PortState};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, Permissions};
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;
use support::agent::{self, Agent, PortArgument};
use support::bpffs::Bpffs;
use support::eventually;
use support::guest::{Guest, METADATA, Spec};
use support::host::Host;
use support::privileged;
use support::record::{Identity, replace};

const PATIENCE: Duration = Duration::from_secs(20);

fn command(words: &[&str]) -> Command {
    let mut command = Command::new(agent::binary().expect("the agent is built"));
    for variable in ["XDP_IMDS_LOG", "XDP_IMDS_LOG_FORMAT", "JOURNAL_STREAM", "COLUMNS"] {
        command.env_remove(variable);
    }
    command.args(words).stdin(Stdio::null());
    command
}

/// Runs the command. Returns its exit code and what it printed.
fn run(words: &[&str]) -> (Option<i32>, String) {
    let Output { status, stdout, stderr } = command(words).output().expect("it runs");
    (status.code(), String::from_utf8_lossy(&[stdout, stderr].concat()).into_owned())
}

/// Runs the command with a standard output whose reader has gone. Returns its exit code and its standard error.
fn run_unread(words: &[&str]) -> (Option<i32>, String) {
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    let output = command(words).stdout(writer).stderr(Stdio::piped()).output().expect("it runs");
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

/// A directory with a record, its path, and the record's.
fn records() -> (tempfile::TempDir, String, String) {
    let room = tempfile::tempdir().expect("a directory");
    Identity::of(0).write(room.path(), 1).expect("a record");
    let record = Identity::of(0).path(room.path()).display().to_string();
    let directory = room.path().display().to_string();
    (room, directory, record)
}

#[test]
fn a_verb_whose_reader_has_gone_ends_quietly() {
    let (room, directory, record) = records();
    let keys = room.path().join("keys").display().to_string();
    let images = room.path().join("images").display().to_string();
    assert_eq!(run(&["identity", "key", &keys]).0, Some(0));
    for words in [
        &["check", &directory][..],
        &["check", &directory, "--paths"],
        &["check", &directory, "--json"],
        &["explain", &record, "GET", "/latest/user-data"],
        &["explain", &record, "GET", "/latest/user-data", "--json"],
        &["export", "nocloud-iso", &record, &images],
        &["token-key"],
        &["identity", "key"],
        &["identity", "jwks", &keys],
        &["doctor", "--no-pins"],
        &["doctor", "--no-pins", "--json"],
    ] {
        let (code, error) = run_unread(words);
        assert_eq!((code, &*error), (Some(141), ""), "{words:?}");
    }
    for words in [&["--help"][..], &["-h"], &["check", "--help"], &["--version"]] {
        let (code, error) = run_unread(words);
        assert_eq!((code, &*error), (Some(0), ""), "{words:?}");
    }
}

#[test]
fn a_full_disk_behind_standard_output_is_not_taken_for_the_state_directorys() {
    let (_room, directory, record) = records();
    for words in [
        &["check", &directory][..],
        &["check", &directory, "--json"],
        &["explain", &record, "GET", "/"],
        &["token-key"],
    ] {
        let full = fs::File::options().write(true).open("/dev/full").expect("a device");
        let output = command(words).stdout(full).stderr(Stdio::piped()).output().expect("it runs");
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{words:?}: {said}");
        assert!(said.contains("cannot write to standard output: No space left"), "{words:?}: {said}");
    }
}

#[privileged::test]
fn a_verb_of_an_agent_whose_reader_has_gone_ends_quietly() {
    let (room, host) = (tempfile::tempdir().expect("a directory"), Host::new().expect("a node"));
    let identity = Identity::of(0);
    identity.write(room.path(), 1).expect("a record");
    let guest = Guest::boot(&host, &Spec::of(&identity)).expect("a guest");
    let port = PortArgument::new(guest.host_tap().name(), identity.mac);
    let _agent = Agent::start(host.ns(), room.path(), &[port]).expect("an agent");
    let (directory, name) = (room.path().join("run").display().to_string(), identity.hostname.clone());
    let file = room.path().join("other.json").display().to_string();
    replace(Path::new(&file), &Identity::of(1).record(1)).expect("a record");
    for words in [
        &["status"][..],
        &["status", "--json"],
        &["status", &name],
        &["ls"],
        &["ls", "--json"],
        &["get", "guest-0.yaml", "--source", "file"],
        &["top", "--once"],
        &["top", "--json"],
        &["register", "-f", &file, "--name", "other"],
        &["rm", "other"],
        &["clear", "guest-0.yaml", "--source", "file"],
        &["trace", &name],
        &["trace", &name, "--json"],
        &["release", "--pins", "/nonexistent", "--hub", "none"],
    ] {
        let run_option = if words[0] == "release" { &[][..] } else { &["--run", &directory] };
        let (code, error) = run_unread(&[words, run_option].concat());
        assert_eq!((code, &*error), (Some(141), ""), "{words:?}");
    }
    // The reader of the first line goes, and no frame comes that would be written.
    let mut trace = command(&["trace", &name, "--run", &directory]);
    let mut trace = trace.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it runs");
    let mut first = String::new();
    BufReader::new(trace.stdout.take().expect("a pipe")).read_line(&mut first).expect("a line");
    let output = trace.wait_with_output().expect("it ends");
    assert!(first.starts_with("tracing "), "{first}");
    assert_eq!((output.status.code(), &output.stderr[..]), (Some(141), &b""[..]));
}

#[test]
fn each_exit_code_means_one_thing() {
    let (room, directory, record) = records();
    let nowhere = room.path().join("nowhere").display().to_string();
    let bad = room.path().join("bad");
    fs::create_dir(&bad).expect("a directory");
    fs::write(bad.join("a.yaml"), "schema: vmrecord/9\n").expect("written");
    let bad = bad.display().to_string();
    let config = room.path().join("config").display().to_string();
    fs::write(&config, "run: [\n").expect("written");
    for (words, code) in [
        (&["check", &directory][..], 0),
        (&["check", &bad], 1),
        (&["check", &bad, "--json"], 1),
        (&["check", &nowhere], 1),
        (&["explain", &nowhere, "GET", "/"], 1),
        (&["status", "--config", &config], 1),
        (&["serve", "--config", &config], 1),
        (&["check"], 2),
        (&["check", "--nope"], 2),
        (&["nope"], 2),
        (&["register", "-f", &record, "--wait", "--timeout", "2d"], 2),
        (&["top", "--interval", "0"], 2),
        (&["trace", "x", "--count", "0"], 2),
        (&["trace", "x", "--seconds", "0"], 2),
        (&["event", "add", "x", "--kind", "reboot", "--id", "a b"], 2),
        (&["event", "add", "x", "--kind", "reboot", "--description", "a\nb"], 2),
        (&["event", "cancel", "x", "a b"], 2),
        (&["explain", &record, "GET", "latest"], 2),
        (&["explain", &record, "GET", "/.."], 2),
        (&["explain", &record, "GET", "/", "-H", "x"], 2),
        (&["status", "--run", &nowhere], 5),
        (&["status", "--json", "--run", &nowhere], 5),
        (&["ls", "--run", &nowhere], 5),
        (&["get", "x", "--run", &nowhere], 5),
        (&["rm", "x", "--run", &nowhere], 5),
        (&["clear", "x", "--run", &nowhere], 5),
        (&["register", "-f", &record, "--run", &nowhere], 5),
        (&["top", "--once", "--run", &nowhere], 5),
        (&["top", "--json", "--run", &nowhere], 5),
        (&["trace", "x", "--run", &nowhere], 5),
        (&["release", "--run", &nowhere], 5),
    ] {
        let (found, text) = run(words);
        assert_eq!(found, Some(code), "{words:?}: {text}");
        assert!(!text.is_empty(), "{words:?}");
    }
}

#[privileged::test]
fn a_missing_permission_has_its_own_exit_code() {
    let (room, directory, record) = records();
    let copy = room.path().join("xdp-imds");
    // By a program of its own: a file that this one has open for writing cannot be run meanwhile (ETXTBSY).
    let binary = agent::binary().expect("the agent");
    let copied = Command::new("cp").arg(binary).arg(&copy).status().expect("cp runs");
    assert!(copied.success(), "{copied}");
    fs::set_permissions(room.path(), Permissions::from_mode(0o755)).expect("its mode");
    fs::set_permissions(&record, Permissions::from_mode(0o600)).expect("its mode");
    let closed = room.path().join("closed");
    fs::create_dir(&closed).expect("a directory");
    fs::create_dir(closed.join("run")).expect("a directory");
    fs::set_permissions(&closed, Permissions::from_mode(0o700)).expect("its mode");
    let closed = closed.join("run").display().to_string();
    for words in [
        &["explain", &record, "GET", "/"][..],
        &["export", "nocloud-iso", &record, "/nonexistent"],
        &["register", "-f", &record],
        &["check", &closed],
        &["status", "--run", &closed],
        &["ls", "--run", &closed],
        &["trace", "x", "--run", &closed],
        &["top", "--once", "--run", &closed],
        &["release", "--pins", &closed],
        &["serve", "--records", &directory],
    ] {
        let mut command = Command::new("setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]).arg(&copy).args(words);
        let output = command.current_dir("/").stdin(Stdio::null()).output().expect("it runs");
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(6), "{words:?} in {directory}: {text}");
        assert!(text.contains("ermission denied"), "{words:?}: {text}");
    }
}

/// The verbs that a help text lists, without `help` itself.
fn verbs(help: &str) -> Vec<String> {
    let list =
        help.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|line| !line.is_empty());
    let names = list.filter(|line| line.starts_with("  ") && !line.starts_with("   "));
    let names = names.filter_map(|line| line.split_whitespace().next()).filter(|name| *name != "help");
    names.map(str::to_owned).collect()
}

#[test]
fn the_short_help_of_each_verb_is_short_and_the_long_one_has_the_exit_codes() {
    let (_, all) = run(&["--help"]);
    assert!(all.contains("\nExit status:\n") && all.contains("\nExamples:\n"), "{all}");
    for verb in verbs(&all) {
        let ((_, short), (_, long)) = (run(&[&verb, "-h"]), run(&[&verb, "--help"]));
        let lines = |text: &str| text.lines().count();
        assert!(lines(&short) * 2 <= lines(&long), "{verb}: {} of {}", lines(&short), lines(&long));
        assert!(lines(&short) <= 40, "{verb}: {short}");
        assert!(!short.contains("--log") && long.contains("--log <FILTER>"), "{verb}: {short}");
        assert!(long.contains("\nExit status:\n    0  "), "{verb}: {long}");
    }
}

#[test]
fn documents_in_json_name_their_form() {
    let (_room, directory, record) = records();
    for (words, schema) in [
        (&["check", &directory, "--json"][..], "check/1"),
        (&["explain", &record, "GET", "/latest/user-data", "--json"], "explain/1"),
        (&["doctor", "--no-pins", "--json"], "doctor/1"),
    ] {
        let output = command(words).output().expect("it runs");
        let document: Value = serde_json::from_slice(&output.stdout).expect("JSON alone");
        assert_eq!(document["schema"], schema, "{words:?}");
    }
}

#[test]
fn a_message_names_the_cause_and_no_other_verbs_remedy() {
    let (room, directory, record) = records();
    let path = |name: &str| room.path().join(name).display().to_string();
    let write = |name: &str, text: &str| {
        fs::write(path(name), text).expect("written");
        fs::set_permissions(path(name), Permissions::from_mode(0o600)).expect("its mode");
        path(name)
    };
    let (missing, empty) = (path("missing.yaml"), path("run"));
    let config = |text: &str| write("config", text);
    let check = |text: &str| run(&["check", &directory, "--config", &config(text)]).1;
    let exposed = write("key", "{}");
    fs::set_permissions(&exposed, Permissions::from_mode(0o640)).expect("its mode");
    for (text, words, not) in [
        (
            run(&["check", &missing]).1,
            "a record, or a directory of records: No such file",
            "directory that can",
        ),
        (run(&["explain", &missing, "GET", "/"]).1, "cannot read the record", "directory that"),
        (run(&["explain", &directory, "GET", "/"]).1, "found the directory", "regular file"),
        (run(&["register", "-f", &missing]).1, "cannot read the record", "directory that"),
        (run(&["register", "-f", &directory]).1, "found the directory", "no agent"),
        (
            run(&["export", "nocloud-iso", &missing, &empty]).1,
            "a record, or a directory",
            "directory that can",
        ),
        (run(&["release", "--run", &empty]).1, "--pins or --config", "xdp-imds serve"),
        (run(&["token-key", "--after", &exposed]).1, "chmod 0600", "remove"),
        (run(&["token-key", "--after", &write("other", "x")]).1, "token_key", "remove"),
        (run(&["token-key", "--after", &missing]).1, "No such file", "remove"),
        (check("limits: {burst: x}\n"), "config:1:17: limits.burst: expected a whole number", "u32"),
        (check("limits: {nope: 1}\n"), "limits.nope: unknown field; the fields", "`nope`"),
        (check("run: null\n"), "run: expected a path, found nothing", "path string"),
        (check("metrics: 9177\n"), "127.0.0.1:9177", "syntax"),
        (run(&["serve", "--metrics", "9177"]).1, "127.0.0.1:9177", "syntax"),
        (
            check("recrods: /a\n"),
            "config:1:1: recrods: unknown field; did you mean `records`?",
            "expected one of",
        ),
        (check("api: {}\n---\nrun: /a\n"), "config:3:1: expected one document", "from_str"),
        (check("steer: foo\n"), "steer: expected one of `xdp`", "variant"),
        (check("run: /a\nrun: /b\n"), "config:2:1: run: given twice", "1:1"),
        (check("schema: vmrecord/1\n"), "the record of a VM, not a configuration", "struct"),
        (run(&["explain", &record, "GET", "/v1/token"]).1, "no field `X-Forwarded-For`: met", "refused with"),
    ] {
        assert!(text.contains(words) && !text.contains(not), "`{words}`, not `{not}`: {text}");
        assert_eq!(text.matches(&path("config")).count(), usize::from(text.contains("config:")), "{text}");
    }
}

#[privileged::test]
fn a_port_that_can_be_no_guests_is_refused_with_the_cause() {
    let (room, host) = (tempfile::tempdir().expect("a directory"), Host::new().expect("a node"));
    let identity = Identity::of(0);
    identity.write(room.path(), 1).expect("a record");
    let guest = Guest::boot(&host, &Spec::of(&identity)).expect("a guest");
    let port = PortArgument::new(guest.host_tap().name(), identity.mac);
    let others = [
        ("lo", PortState::Error, "the loopback interface"),
        ("imds-in", PortState::Error, "a device of an xdp-imds hub"),
        ("imds-out", PortState::Error, "a device of an xdp-imds hub"),
        ("tap7@no-such-namespace", PortState::Waiting, "no such network namespace"),
        ("tap8", PortState::Waiting, "no such interface"),
    ];
    let mut words = agent::arguments(room.path(), &[port]);
    words.extend(others.iter().flat_map(|(port, ..)| ["--port".into(), (*port).into()]));
    let agent =
        Agent::start_binary(&agent::binary().expect("the agent"), host.ns(), words).expect("an agent");
    let directory = room.path().join("run").display().to_string();
    let status = eventually(PATIENCE, || {
        let (_, text) = run(&["status", "--all", "--json", "--run", &directory]);
        let status: AgentStatus = serde_json::from_str(&text)?;
        let settled = |(name, state, _): &(&str, PortState, &str)| {
            status.ports.listed.iter().any(|port| port.name == *name && port.state == *state)
        };
        ensure!(others.iter().all(settled), "{:?}", status.ports.listed);
        Ok(status)
    });
    let status = status.unwrap_or_else(|error| panic!("{error:#}\n{}", agent.log()));
    for (name, _, words) in others {
        let port = status.ports.listed.iter().find(|port| port.name == name).expect("it is listed");
        let reason = port.reason.as_deref().unwrap_or_default();
        assert!(reason.contains(words), "{name}: {reason}");
        assert!(!reason.contains("xdp off"), "it would end the service: {reason}");
    }
    let url = format!("http://{METADATA}/v1/meta-data");
    guest.curl(&[&url], PATIENCE).unwrap_or_else(|error| panic!("{error:#}\n{}", agent.log()));
}

#[privileged::test]
fn release_removes_the_hubs_of_a_killed_agent_and_no_others() {
    let (room, host) = (tempfile::tempdir().expect("a directory"), Host::new().expect("a node"));
    let bpffs = Bpffs::mount().expect("a bpffs");
    let pins = bpffs.pins().display().to_string();
    let start = || {
        let words = agent::arguments_with_pins(room.path(), &[], Path::new(&pins));
        Agent::start_binary(&agent::binary().expect("the agent"), host.ns(), words).expect("an agent")
    };
    let hubs = || -> BTreeSet<String> {
        let links = host.ns().links().expect("links");
        let names = links.iter().filter_map(|link| link["ifname"].as_str());
        names.filter(|name| name.starts_with("imds-")).map(str::to_owned).collect()
    };
    let release = |more: &[&str]| {
        let words = [&["release", "--pins", &pins][..], more].concat();
        let output = host.ns().output(&mut command(&words)).expect("it runs");
        let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        (output.status.code(), text)
    };
    let agent = start();
    let (code, text) = release(&[]);
    assert!(code == Some(4) && text.contains("--force") && !text.contains("--takeover"), "{code:?} {text}");
    let (code, text) = release(&["--force"]);
    assert!(code == Some(0) && !text.contains("veth"), "a running agent keeps its hubs: {text}");
    assert!(hubs().contains("imds-in"), "{:?}", hubs());
    agent.kill().expect("killed");
    assert!(hubs().contains("imds-in"), "{:?}", hubs());
    let (code, text) = release(&["--hub", "other"]);
    assert!(code == Some(0) && !text.contains("veth") && hubs().contains("imds-in"), "{text}");
    let (code, text) = release(&[]);
    assert!(code == Some(0) && text.contains("removed the veth pair"), "{code:?} {text}");
    assert_eq!(hubs(), BTreeSet::new());
}

// The agent writes the manual pages and completions of shells that packages ship.

/// Runs the agent with a clean environment and returns its standard output.
fn printed(words: &[&str]) -> String {
    let mut command = Command::new(agent::binary().expect("the agent is built"));
    let output = command.args(words).env_remove("XDP_IMDS_LOG").output().expect("the agent runs");
    assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("UTF-8")
}

fn pages() -> tempfile::TempDir {
    let room = tempfile::tempdir().expect("a directory");
    printed(&["pages", &room.path().to_string_lossy()]);
    room
}

/// Returns the long options that a verb's help lists.
fn options(verb: &str) -> Vec<String> {
    let help = printed(&[verb, "--help"]);
    let words =
        help.lines().filter(|line| line.trim_start().starts_with('-')).flat_map(str::split_whitespace);
    let long = words.filter_map(|word| word.strip_prefix("--"));
    long.map(|word| word.trim_end_matches(',').to_owned()).collect()
}

/// Returns all files below a directory, by their paths in it.
fn files(top: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut files = BTreeMap::new();
    for directory in fs::read_dir(top).expect("a directory") {
        for file in fs::read_dir(directory.expect("an entry").path()).expect("a directory") {
            let path = file.expect("an entry").path();
            let name = path.strip_prefix(top).expect("it is below").to_owned();
            files.insert(name, fs::read(&path).expect("a file"));
        }
    }
    files
}

#[test]
fn every_verb_has_a_manual_page_with_its_options() {
    let room = pages();
    let verbs = verbs(&printed(&["--help"]));
    assert!(verbs.contains(&"serve".to_owned()), "{verbs:?}");
    for verb in verbs {
        let page = room.path().join("man1").join(format!("xdp-imds-{verb}.1"));
        let text = fs::read_to_string(&page).unwrap_or_else(|error| panic!("{}: {error}", page.display()));
        for option in options(&verb) {
            let escaped = format!("\\-\\-{}", option.replace('-', "\\-"));
            assert!(text.contains(&escaped), "{verb}: the page lacks --{option}");
        }
    }
}

/// The lines of a section of a manual page.
fn section<'a>(page: &'a str, name: &str) -> Vec<&'a str> {
    let heading = [format!(".SH {name}"), format!(".SH \"{name}\"")];
    let lines = page.lines().skip_while(|line| !heading.iter().any(|heading| line == heading)).skip(1);
    lines
        .take_while(|line| !line.starts_with(".SH"))
        .filter(|line| !line.starts_with(".ie") && !line.starts_with(".el"))
        .collect()
}

#[test]
fn a_manual_page_has_one_line_of_name_the_whole_synopsis_and_the_exit_codes() {
    let room = pages();
    for file in fs::read_dir(room.path().join("man1")).expect("a directory") {
        let path = file.expect("an entry").path();
        let page = fs::read_to_string(&path).expect("text");
        let name = path.file_stem().expect("a name").to_string_lossy().replace('-', "\\-");
        let [line] = section(&page, "NAME")[..] else { panic!("{}: {page}", path.display()) };
        let about = line.strip_prefix(&format!("{name} \\- ")).unwrap_or_else(|| panic!("{line}"));
        assert!(about.len() <= 100 && !about.ends_with('.') && !about.contains(". "), "{line}");
        let [synopsis] = section(&page, "SYNOPSIS")[..] else { panic!("{}: {page}", path.display()) };
        let groups = ["identity", "event", "openstack"];
        let verb = groups.iter().fold(name.clone(), |name, group| {
            name.replacen(&format!("xdp\\-imds\\-{group}\\-"), &format!("xdp\\-imds {group} "), 1)
        });
        let verb = verb.replacen("xdp\\-imds\\-", "xdp\\-imds ", 1);
        assert!(synopsis.starts_with(&format!("\\fB{verb}\\fR")), "{synopsis}");
        assert!(!synopsis.contains("OPTIONS"), "each option has its name: {synopsis}");
        let exits = section(&page, "EXIT STATUS").join("\n");
        assert!(exits.contains("\\fB0\\fR"), "{}: {exits}", path.display());
        let options = section(&page, "OPTIONS");
        let at = options.iter().position(|line| line.contains("\\-\\-log\\fR")).expect("--log");
        assert!(options[at + 1].contains("log level"), "{}: {options:?}", path.display());
    }
}

#[test]
fn completions_have_no_placeholders_and_no_hidden_verbs() {
    let room = pages();
    for (name, text) in files(room.path()) {
        let text = String::from_utf8(text).expect("text");
        if name.starts_with("bash") {
            for line in text.lines().filter(|line| line.contains("opts=")) {
                assert!(!line.contains('<') && !line.contains('['), "{line}");
            }
        }
        if !name.starts_with("man1") {
            for verb in ["pages", "signer"] {
                let is_verb =
                    text.split(|c: char| !c.is_ascii_alphanumeric() && c != '-').any(|word| word == verb);
                assert!(!is_verb, "{}: {verb}", name.display());
            }
        }
        assert!(!name.to_string_lossy().contains("signer"), "{}", name.display());
    }
}

#[test]
fn a_shell_completes_verbs_and_options() {
    let room = pages();
    for (line, expected) in
        [("xdp-imds doc", "doctor"), ("xdp-imds serve --rec", "--records"), ("xdp-imds status --j", "--json")]
    {
        let script = r#"
            source "$1"
            COMP_WORDS=($2) COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
            function=$(complete -p xdp-imds | sed "s/.*-F \([^ ]*\) .*/\1/")
            $function xdp-imds "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
            echo "${COMPREPLY[@]}"
        "#;
        let mut bash = Command::new("bash");
        bash.args(["--norc", "-ec", script, "bash"]).arg(room.path().join("bash/xdp-imds.bash")).arg(line);
        let output = bash.output().expect("bash runs");
        let shown = String::from_utf8_lossy(&output.stdout);
        assert_eq!(shown.trim(), expected, "{line}: {}", String::from_utf8_lossy(&output.stderr));
    }
}

#[test]
fn the_pages_do_not_depend_on_the_environment() {
    let (one, other) = (pages(), tempfile::tempdir().expect("a directory"));
    let mut command = Command::new(agent::binary().expect("the agent is built"));
    command.arg("pages").arg(other.path()).current_dir("/");
    command.env("COLUMNS", "40").env("LC_ALL", "C").env("XDP_IMDS_LOG", "debug").env("TZ", "Asia/Tokyo");
    assert!(command.status().expect("the agent runs").success());
    let (one, other) = (files(one.path()), files(other.path()));
    assert!(one.len() > 10, "{:?}", one.keys());
    for (name, bytes) in &one {
        assert!(other.get(name) == Some(bytes), "{} differs", name.display());
    }
    assert_eq!(one.len(), other.len());
}
