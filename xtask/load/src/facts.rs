//! What a host has before a load or an unload.

use anyhow::{Context as _, Result, bail, ensure};
use shell::Root;
use shell::architecture::Architecture;
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fmt;
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::plan;

/// The package manager that owns an agent on a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Manager {
    /// Debian's.
    Dpkg,
    /// That of Fedora and others.
    Rpm,
}

/// What a host has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Facts {
    /// The machine, as uname(1) names it.
    pub(crate) machine: String,
    /// The kernel's version.
    pub(crate) kernel: String,
    /// systemd runs.
    pub(crate) systemd: bool,
    /// The service runs.
    pub(crate) active: bool,
    /// The package that owns an agent, and its manager.
    pub(crate) package: Option<(Manager, String)>,
    /// What the loaded binary says of itself.
    pub(crate) version: Option<String>,
    /// What the binary before it says of itself.
    pub(crate) previous: Option<String>,
    /// The unit in place was written by someone else.
    pub(crate) foreign_unit: bool,
    /// There is a configuration.
    pub(crate) config: bool,
    /// There is something that only a load makes.
    pub(crate) is_loaded: bool,
    /// The process of the agent: the service's, or the one that the pid file names.
    pub(crate) pid: Option<u32>,
}

impl Facts {
    /// Asks the host.
    pub(crate) fn of(host: &Host, root: &Prefix) -> Result<Self> {
        let script =
            Script { text: include_str!("scripts/facts.sh"), words: Vec::new(), input: Input::Nothing };
        let printed = host.run(root, &script)?;
        Self::parse(&printed).with_context(|| format!("{host} answers unexpectedly"))
    }

    fn parse(printed: &str) -> Result<Self> {
        let mut facts = Self::default();
        // A login shell may print a greeting first.
        for (name, value) in printed.lines().filter_map(|line| line.split_once('=')) {
            match name {
                "machine" => facts.machine = value.into(),
                "kernel" => facts.kernel = value.into(),
                "systemd" => facts.systemd = true,
                "active" => facts.active = true,
                "package" => facts.package = Some(package(value)?),
                "version" => facts.version = Some(value.into()),
                "previous" => facts.previous = Some(value.into()),
                "unit" => {
                    facts.foreign_unit = value == "foreign";
                    facts.is_loaded |= value == "ours";
                }
                "config" => facts.config = true,
                "lib" | "pidfile" => facts.is_loaded = true,
                "pid" => facts.pid = Some(value.parse().context("expected a process id")?),
                _ => {}
            }
        }
        ensure!(!facts.machine.is_empty(), "expected the name of its machine, found {printed:?}");
        facts.is_loaded |= facts.pid.is_some();
        Ok(facts)
    }

    /// True if an agent runs that a load has started.
    pub(crate) fn runs(&self) -> bool {
        self.pid.is_some()
    }

    /// Fails if somebody else owns the agent of this host. The error says how to go on.
    pub(crate) fn check_owner(&self, host: &Host) -> Result<()> {
        if let Some((manager, package)) = &self.package {
            let how = match manager {
                Manager::Dpkg => format!(
                    "upgrade it with `apt-get install ./xdp-imds_VERSION_ARCH.deb` (`cargo xtask deb --static` \
                     makes that file), remove it with `apt-get purge {package}`"
                ),
                Manager::Rpm => format!(
                    "upgrade it with `dnf install ./xdp-imds-VERSION.ARCH.rpm`, remove it with `dnf remove {package}`"
                ),
            };
            bail!("the package {package} owns the agent of {host}; {how}");
        }
        let unit = plan::UNIT;
        ensure!(
            !self.foreign_unit,
            "{host} has a unit {unit} that this command did not write; move it away, and put what it changes into \
             a drop-in: `systemctl edit {}`",
            plan::SERVICE
        );
        Ok(())
    }

    /// Describes the host in one line.
    pub(crate) fn line(&self) -> String {
        let init = if self.systemd { "systemd" } else { "no systemd" };
        let agent = match (&self.package, &self.version, self.runs()) {
            (Some((_, package)), ..) => format!("has the package {package}"),
            (None, Some(version), true) => format!("runs {version}"),
            (None, Some(version), false) => format!("has {version}, which does not run"),
            (None, None, _) if self.foreign_unit => "has an agent of another origin".into(),
            (None, None, _) => "has no agent".into(),
        };
        format!("{}, Linux {}, {init}; {agent}", self.machine, self.kernel)
    }
}

fn package(value: &str) -> Result<(Manager, String)> {
    match value.split_once(' ') {
        Some(("dpkg", name)) => Ok((Manager::Dpkg, name.to_owned())),
        Some(("rpm", name)) => Ok((Manager::Rpm, name.to_owned())),
        _ => bail!("expected a package manager and a package, found {value:?}"),
    }
}

// Builds the static agent for a host's machine, or takes one that is built.

/// The number of an architecture in an ELF header (elf.h).
fn elf(architecture: Architecture) -> u16 {
    match architecture {
        Architecture::X86 => 62,
        Architecture::Arm => 183,
    }
}

/// Builds the agent for a machine, as uname(1) names it; returns the path of the binary.
pub(crate) fn build(machine: &str, profile: &str) -> Result<PathBuf> {
    let architecture =
        Architecture::named(machine).context("build an agent, and name it with --agent FILE")?;
    architecture.build_static(profile)
}

/// Checks that a binary is one for a machine, as uname(1) names it.
pub(crate) fn check(binary: &Path, machine: &str) -> Result<()> {
    let mut head = [0; 20];
    let read = File::open(binary).and_then(|mut file| file.read_exact(&mut head));
    read.with_context(|| format!("cannot read the agent {}", binary.display()))?;
    ensure!(head.starts_with(b"\x7fELF"), "{} is not a program of Linux", binary.display());
    // The order of bytes is the fifth of the identification; both machines of the agent are little-endian.
    let found = u16::from_le_bytes([head[18], head[19]]);
    let Ok(expected) = Architecture::named(machine) else { return Ok(()) };
    if found != elf(expected) {
        let found = Architecture::ALL.into_iter().find(|one| elf(*one) == found);
        let found = found.map_or("another machine", Architecture::name);
        bail!("{} is an agent for {found}, and the host is {machine}", binary.display());
    }
    Ok(())
}

// Runs shell scripts on a host: this one, or another one by the user's own `ssh`.

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
    /// Returns the hosts in order, each once: all are asked before the first one changes, so a second load would use
    /// facts from before the first, and a second rollback would undo the first.
    pub(crate) fn list(&self) -> Vec<Host> {
        if self.hosts.is_empty() {
            return vec![Host::Here];
        }
        let host = |name: &String| Host::Ssh { name: name.clone(), options: self.options.clone() };
        let mut seen = BTreeSet::new();
        self.hosts.iter().filter(|name| seen.insert(*name)).map(host).collect()
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
    /// Another one, over ssh.
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
                if user.trim() == "0" {
                    return Ok(Vec::new());
                }
                // Nobody is there to type a password.
                let sudo = vec!["sudo".into(), "-n".into()];
                self.run(&sudo, &probe).with_context(|| {
                    format!(
                        "cannot become root on {name}: `ssh {name} sudo -n true` must work first; allow the user \
                         NOPASSWD in sudoers, or log in as root (`--ssh-option=-oUser=root`)"
                    )
                })?;
                Ok(sudo)
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
    use shell::architecture::Architecture;
    use std::process::Command;

    use super::{Facts, Hosts, Input, Manager, Script, build, check, name, quoted};
    use crate::facts::Host;

    #[test]
    fn facts_are_read_from_lines_and_a_greeting_is_skipped() {
        let printed = "Welcome to hv1!\nmachine=x86_64\nkernel=6.1.0-40-amd64\nsystemd=yes\nactive=yes\n\
                       version=xdp-imds 0.1.0 (build 5)\nunit=ours\nconfig=yes\npid=77\n";
        let facts = Facts::parse(printed).expect("facts");
        let expected = Facts {
            machine: "x86_64".into(),
            kernel: "6.1.0-40-amd64".into(),
            systemd: true,
            active: true,
            version: Some("xdp-imds 0.1.0 (build 5)".into()),
            config: true,
            is_loaded: true,
            pid: Some(77),
            ..Facts::default()
        };
        assert_eq!(facts, expected);
        assert!(Facts::parse("Connection to hv1 closed.\n").is_err());
    }

    #[test]
    fn an_agent_of_somebody_else_is_refused_with_the_way_to_go_on() {
        let of = |line: &str| Facts::parse(&format!("machine=x86_64\n{line}\n")).expect("facts");
        for (line, shown, remedy) in [
            ("package=dpkg xdp-imds", "has the package xdp-imds", "apt-get install"),
            ("package=rpm xdp-imds", "has the package xdp-imds", "dnf install"),
            ("unit=foreign", "of another origin", "systemctl edit"),
        ] {
            let facts = of(line);
            assert!(facts.line().contains(shown), "{}", facts.line());
            let error = facts.check_owner(&Host::Here).expect_err(line).to_string();
            assert!(error.contains(remedy), "{line}: {error}");
        }
        assert_eq!(of("package=rpm x").package, Some((Manager::Rpm, "x".into())));
        for line in ["unit=ours", "config=yes"] {
            assert!(of(line).check_owner(&Host::Here).is_ok(), "{line}");
        }
    }

    #[test]
    fn a_host_is_loaded_if_it_has_what_only_a_load_makes() {
        for (line, is_loaded) in [
            ("lib=yes", true),
            ("pidfile=yes", true),
            ("pid=7", true),
            ("unit=ours", true),
            ("unit=foreign", false),
            ("version=x", false),
            ("config=yes", false),
        ] {
            let facts = Facts::parse(&format!("machine=x86_64\n{line}")).expect("facts");
            assert_eq!(facts.is_loaded, is_loaded, "{line}");
        }
    }

    #[test]
    fn an_agent_runs_if_it_has_a_process() {
        for (lines, runs) in [
            ("systemd=yes\nactive=yes\npid=7", true),
            ("systemd=yes", false),
            ("pid=7", true),
            ("version=x", false),
        ] {
            let facts = Facts::parse(&format!("machine=x86_64\n{lines}")).expect("facts");
            assert_eq!(facts.runs(), runs, "{lines}");
        }
    }

    #[test]
    fn a_machine_without_an_agent_is_refused_with_a_remedy() {
        let error = format!("{:#}", build("riscv64", "dev").expect_err("there is none"));
        assert!(error.contains("riscv64") && error.contains("--agent"), "{error}");
    }

    #[test]
    fn only_a_program_for_the_machine_is_accepted() {
        let own = std::env::current_exe().expect("this program");
        let here = std::env::consts::ARCH;
        let other = Architecture::ALL
            .map(Architecture::name)
            .into_iter()
            .find(|name| *name != here)
            .expect("another");
        assert!(check(&own, here).is_ok());
        let error = check(&own, other).expect_err("another machine").to_string();
        assert!(error.contains(here) && error.contains(other), "{error}");
        let script = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(script.path(), "#!/bin/sh\nexec echo xdp-imds\n").expect("a script");
        assert!(check(script.path(), here).is_err());
    }

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
    fn a_host_that_is_named_twice_is_listed_once() {
        for (given, expected) in [
            (&[][..], &["this host"][..]),
            (&["hv1"], &["hv1"]),
            (&["hv2", "hv1"], &["hv2", "hv1"]),
            (&["hv1", "hv1"], &["hv1"]),
            (&["hv2", "hv1", "hv2", "hv1"], &["hv2", "hv1"]),
        ] {
            let hosts = given.iter().map(|&name| name.to_owned()).collect();
            let listed = Hosts { hosts, options: Vec::new() }.list();
            let listed: Vec<_> = listed.iter().map(ToString::to_string).collect();
            assert_eq!(listed, expected, "{given:?}");
        }
    }

    #[test]
    fn an_option_is_no_host() {
        assert!(name("-oProxyCommand=x").is_err());
        assert!(name("").is_err());
        assert_eq!(name("root@hv1"), Ok("root@hv1".into()));
    }
}
