//! Checks that the programs accept the command lines in README and book.

use super::help::{Programs, asked};
use super::markdown::Page;
use super::statements;
use anyhow::Result;
use std::collections::BTreeMap;
use std::path::Path;

/// The first words of the project's commands.
const AGENT: &[&str] = &["xdp-imds"];
const XTASK: &[&str] = &["cargo", "xtask"];
/// The verb of `cargo xtask` that runs another program, in a place of the lab.
const IN_LAB: &[&str] = &["lab", "shell"];

/// The languages of code blocks in which every line is a command. In `text`, only a line after a prompt is a command.
const SHELL: [&str; 2] = ["sh", "console"];

/// Finds verbs and options that the programs refuse. Each command runs with `--help` added, so it has no effect: a
/// program checks the words before `--help` and then prints its help. A missing word is therefore not found.
pub(super) fn findings(pages: &[Page], programs: &Programs) -> Result<Vec<String>> {
    let mut places: BTreeMap<Vec<String>, String> = BTreeMap::new();
    for page in pages {
        for (line, text) in lines(page) {
            for words in commands(&text) {
                places.entry(words).or_insert_with(|| page.at(line));
            }
        }
    }
    let mut findings = Vec::new();
    for (words, place) in &places {
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        if let Some(reason) = refused(&words, programs)? {
            findings.push(format!("{place}: `{}`: {reason}", words.join(" ")));
        }
    }
    Ok(findings)
}

/// Returns the reason for which a program refuses a command.
fn refused(words: &[&str], programs: &Programs) -> Result<Option<String>> {
    if let Some(rest) = words.strip_prefix(AGENT) {
        return help(&programs.agent, rest);
    }
    if let Some(rest) = words.strip_prefix(XTASK) {
        // The words after the place are those of another program, which would get `--help`.
        let own = if rest.starts_with(IN_LAB) { rest.len().min(IN_LAB.len() + 1) } else { rest.len() };
        return help(&programs.xtask, &rest[..own]);
    }
    // `cargo test` and `cargo bench` name a program, which must be registered.
    let named = words.windows(2).find(|pair| matches!(pair[0], "--test" | "--bench")).map(|pair| pair[1]);
    let known = statements::programs()?;
    Ok(named
        .filter(|name| *name != "NAME" && !known.contains(*name))
        .map(|name| format!("tests/Cargo.toml has no {name}")))
}

fn help(program: &Path, words: &[&str]) -> Result<Option<String>> {
    let output = asked(program, &[words, &["--help"]].concat()).output()?;
    let shown = String::from_utf8_lossy(&output.stderr);
    // `libvirt-hook` always exits with 0 and reports bad arguments on standard error.
    let bad = !output.status.success() || shown.starts_with("error:");
    Ok(bad.then(|| shown.lines().next().unwrap_or_default().to_owned()))
}

/// Returns the lines that may hold commands: those of shell blocks, with continued lines joined, and code spans.
fn lines(page: &Page) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for block in page.blocks() {
        let shell = SHELL.contains(&block.language.as_str());
        let mut whole = String::new();
        for (number, line) in block.text.lines().enumerate() {
            let line = match line.strip_prefix("# ") {
                Some(command) if block.language == "text" => command,
                _ if !shell => continue,
                _ => line,
            };
            whole.push_str(line);
            if whole.ends_with('\\') {
                whole.truncate(whole.len() - 1);
            } else {
                found.push((block.line + number, std::mem::take(&mut whole)));
            }
        }
    }
    found.extend(page.spans().into_iter().filter(|(_, span)| span.contains(' ')));
    found
}

/// Finds the project's commands in a line of shell, including after an assignment, in `$(…)` and after `--`.
fn commands(line: &str) -> Vec<Vec<String>> {
    let mut found = Vec::new();
    for segment in split(line) {
        let starts = [AGENT, XTASK, &["cargo", "test"], &["cargo", "bench"]];
        let at = (0..segment.len()).find(|at| {
            // The word is an argument if another word precedes it, unless that word runs another program.
            let first = *at == 0
                || matches!(segment[*at - 1].as_str(), "--" | "sudo" | "exec")
                || segment[*at - 1].contains('=');
            first
                && starts.iter().any(|start| {
                    segment[*at..].iter().map(String::as_str).take(start.len()).eq(start.iter().copied())
                })
        });
        let Some(at) = at else { continue };
        let words: Vec<String> = segment[at..].iter().map(|word| filled(word)).collect();
        if words.iter().any(|word| word.contains('…') || word.starts_with('[') || word == "VERB") {
            continue;
        }
        found.push(words);
    }
    found
}

/// Replaces the placeholder `N` by a number.
fn filled(word: &str) -> String {
    if word == "N" { "1".to_owned() } else { word.to_owned() }
}

/// Splits a line into simple commands, and each command into words. It knows the part of shell syntax that the book
/// uses.
fn split(line: &str) -> Vec<Vec<String>> {
    let mut commands = vec![Vec::new()];
    let mut word: Option<String> = None;
    let mut quote = None;
    let mut characters = line.chars().peekable();
    while let Some(c) = characters.next() {
        let ends = match (quote, c) {
            // A command substitution is a command of its own, even within double quotes.
            (None | Some('"'), '$') if characters.peek() == Some(&'(') => {
                characters.next();
                quote = None;
                true
            }
            (Some(open), _) if open == c => {
                quote = None;
                false
            }
            (Some(_), _) => {
                word.get_or_insert_default().push(c);
                continue;
            }
            (None, '\'' | '"') => {
                quote = Some(c);
                word.get_or_insert_default();
                continue;
            }
            (None, '#') if word.is_none() => break,
            (None, '|' | '&' | ';' | '(' | ')' | '>' | '<') => true,
            (None, c) if c.is_whitespace() => {
                commands.last_mut().expect("never empty").extend(word.take());
                continue;
            }
            (None, c) => {
                word.get_or_insert_default().push(c);
                continue;
            }
        };
        if ends {
            commands.last_mut().expect("never empty").extend(word.take());
            commands.push(Vec::new());
        }
    }
    commands.last_mut().expect("never empty").extend(word);
    commands
}

#[cfg(test)]
mod tests {
    use super::commands;

    #[test]
    fn commands_are_found_wherever_a_shell_would_run_them() {
        let cases: [(&str, &[&str]); 9] = [
            ("xdp-imds status web-1   # a guest", &["xdp-imds status web-1"]),
            ("kubectl -n a exec b -- xdp-imds token-key | base64 -w0", &["xdp-imds token-key"]),
            (r#"key=$(kubectl exec a -- xdp-imds token-key | base64)"#, &["xdp-imds token-key"]),
            (
                r#"-p "{\"k\":\"$(xdp-imds token-key --after old.key | base64 -w0)\"}""#,
                &["xdp-imds token-key --after old.key"],
            ),
            ("systemctl disable --now xdp-imds && xdp-imds release", &["xdp-imds release"]),
            ("cargo install cargo-deb && cargo xtask deb", &["cargo xtask deb"]),
            ("cargo xtask soak --minutes N", &["cargo xtask soak --minutes 1"]),
            ("helm install xdp-imds deploy/helm/xdp-imds", &[]),
            ("xdp-imds serve --takeover …", &[]),
        ];
        for (line, expected) in cases {
            let found: Vec<String> = commands(line).into_iter().map(|words| words.join(" ")).collect();
            assert_eq!(found, expected, "{line}");
        }
    }
}
