//! Runs shell scripts on a host: this one, or another one by the user's own `ssh`.

use anyhow::{Context as _, Result, bail, ensure};
use shell::Root;
use std::ffi::OsString;
use std::fmt;
use std::fs::File;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use crate::plan;

/// Which hosts to work on, and how to reach them.
#[derive(clap::Args)]
pub(crate) struct Hosts {
    /// The hypervisors, as `ssh` knows them; one after the other. Without this option: this host
    #[arg(long = "host", value_name = "HOST", num_args = 1.., value_parser = name)]
    hosts: Vec<String>,
    /// A word to pass to `ssh` before the host, such as `-p2222` or `-oUser=root`; repeat for more
    #[arg(long = "ssh-option", value_name = "WORD", allow_hyphen_values = true, requires = "hosts")]
    options: Vec<String>,
}

impl Hosts {
    /// Returns the hosts in order.
    pub(crate) fn list(&self) -> Vec<Host> {
        if self.hosts.is_empty() {
            return vec![Host::Here];
        }
        let host = |name: &String| Host::Ssh { name: name.clone(), options: self.options.clone() };
        self.hosts.iter().map(host).collect()
    }

    /// Returns these options as they were given, for a command that the user may copy.
    pub(crate) fn shown(&self, only: &Host) -> String {
        let Host::Ssh { name, options } = only else { return String::new() };
        let options: String = options.iter().map(|word| format!(" --ssh-option={word}")).collect();
        format!(" --host {name}{options}")
    }
}

/// Checks the name of a host. `ssh` would read a leading dash as an option.
fn name(text: &str) -> Result<String, String> {
    if text.is_empty() || text.starts_with('-') {
        return Err("expected the name of a host, as `ssh` knows it".into());
    }
    Ok(text.to_owned())
}

/// A host that scripts run on.
#[derive(Clone, Debug)]
pub(crate) enum Host {
    /// This one.
    Here,
    /// Another one, by ssh.
    Ssh {
        /// The host's name for ssh.
        name: String,
        /// Words for ssh before the name.
        options: Vec<String>,
    },
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Here => f.write_str("this host"),
            Self::Ssh { name, .. } => f.write_str(name),
        }
    }
}

/// The standard input of a script.
#[derive(Clone, Debug)]
pub(crate) enum Input {
    /// Empty.
    Nothing,
    /// A text.
    Text(String),
    /// A file of this host.
    File(PathBuf),
}

/// A script and its arguments.
#[derive(Clone, Debug)]
pub(crate) struct Script {
    /// The text, without what precedes every script.
    pub(crate) text: &'static str,
    /// Its arguments, `$1` and so on.
    pub(crate) words: Vec<String>,
    /// Its standard input.
    pub(crate) input: Input,
}

/// The words before a script that make it run as root; none if the user is root.
pub(crate) type Prefix = Vec<OsString>;

impl Host {
    /// Finds out how scripts become root on this host.
    pub(crate) fn root(&self) -> Result<Prefix> {
        match self {
            Self::Here => match shell::root() {
                Root::Already => Ok(Vec::new()),
                Root::Sudo(sudo) => Ok(vec![sudo.into(), "--".into()]),
                Root::No(reason) => bail!("loading needs root, but {reason}; run the command as root"),
            },
            Self::Ssh { name, .. } => {
                let probe = Script { text: "id -u", words: Vec::new(), input: Input::Nothing };
                let user = self.run(&Vec::new(), &probe).with_context(|| {
                    format!("cannot run a command on {name}; `ssh {name} true` must work first")
                })?;
                // Nobody is there to type a password.
                Ok(if user.trim() == "0" { Vec::new() } else { vec!["sudo".into(), "-n".into()] })
            }
        }
    }

    /// Runs a script and returns its standard output. Its standard error is this program's.
    pub(crate) fn run(&self, root: &Prefix, script: &Script) -> Result<String> {
        let mut command = self.command(root, script);
        command.stdout(Stdio::piped());
        command.stdin(match &script.input {
            Input::Nothing => Stdio::null(),
            Input::Text(_) => Stdio::piped(),
            Input::File(path) => {
                File::open(path).with_context(|| format!("cannot read {}", path.display()))?.into()
            }
        });
        let program = command.get_program().to_owned();
        let mut child = command.spawn().with_context(|| format!("cannot run {}", program.display()))?;
        if let (Input::Text(text), Some(mut input)) = (&script.input, child.stdin.take()) {
            // A script that ends early closes the pipe. Its exit code says more than the pipe's error.
            drop(input.write_all(text.as_bytes()));
        }
        let output = child.wait_with_output()?;
        ensure!(output.status.success(), "{self}: failed ({}); see the messages above", output.status);
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    fn command(&self, root: &Prefix, script: &Script) -> Command {
        let text = format!("{}{}{}", plan::assignments(), include_str!("scripts/common.sh"), script.text);
        let mut words: Vec<OsString> = root.clone();
        words.extend(["sh".into(), "-c".into(), text.into(), "sh".into()]);
        words.extend(script.words.iter().map(Into::into));
        match self {
            Self::Here => {
                let mut command = Command::new(&words[0]);
                command.args(&words[1..]);
                command
            }
            Self::Ssh { name, options } => {
                let mut command = Command::new("ssh");
                let line: Vec<_> = words.iter().map(|word| quoted(&word.to_string_lossy())).collect();
                command.arg("-T").args(options).arg("--").arg(name).arg(line.join(" "));
                command
            }
        }
    }
}

/// Quotes a word for the login shell at the other end, to which ssh passes one line.
fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::{Host, Input, Script, name, quoted};
    use std::process::Command;

    #[test]
    fn a_quoted_word_reaches_the_program_unchanged() {
        for word in ["", "plain", "two words", "it's", "$HOME `id` \\ \"", "a\nb", "--", "*"] {
            let line = format!("printf %s {}", quoted(word));
            let output = Command::new("sh").args(["-c", &line]).output().expect("a shell");
            assert_eq!(String::from_utf8_lossy(&output.stdout), word);
        }
    }

    #[test]
    fn a_script_has_its_arguments_and_its_input() {
        let text = "echo \"$1\"; cat";
        let input = Input::Text("input".into());
        let script = Script { text, words: vec!["an argument".into()], input };
        let printed = Host::Here.run(&Vec::new(), &script).expect("it runs");
        assert_eq!(printed, "an argument\ninput");
    }

    #[test]
    fn a_script_that_fails_names_the_host() {
        let script = Script { text: "exit 7", words: Vec::new(), input: Input::Nothing };
        let error = Host::Here.run(&Vec::new(), &script).expect_err("it fails");
        assert!(error.to_string().contains("this host") && error.to_string().contains('7'), "{error}");
    }

    #[test]
    fn an_option_is_no_host() {
        assert!(name("-oProxyCommand=x").is_err());
        assert!(name("").is_err());
        assert_eq!(name("root@hv1"), Ok("root@hv1".into()));
    }
}
