//! The agent writes the manual pages and completions of shells that packages ship.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use support::agent;

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

/// Returns the verbs that the agent's help lists, without `help` itself.
fn verbs() -> Vec<String> {
    let help = printed(&["--help"]);
    let list =
        help.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|line| !line.is_empty());
    let names = list.filter(|line| line.starts_with("  ") && !line.starts_with("   "));
    let names = names.filter_map(|line| line.split_whitespace().next()).filter(|name| *name != "help");
    names.map(str::to_owned).collect()
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
    let verbs = verbs();
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
        let verb = name.replacen("xdp\\-imds\\-identity\\-", "xdp\\-imds identity ", 1);
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
