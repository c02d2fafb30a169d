//! The verbs of the command except `serve`. Most inspect records, an agent or a node, and then exit.

pub mod check;
pub mod doctor;
pub mod event;
pub mod explain;
pub mod export;
pub mod identity;
pub mod instances;
pub mod openstack;
pub mod options;
pub mod pages;
pub mod release;
pub mod top;
pub mod trace;
#[cfg(feature = "kubevirt")]
pub mod webhook;

use clap::Command;
use metadata_control::instances::RegistrationError;
use metadata_control::status::ClientError;
use metadata_datapath::afxdp::AfxdpError;
use metadata_feed::FeedError;
use metadata_links::error::LinkError;
use metadata_steer::{PinsError, SteerError};
use rustix::io::Errno;
use std::error::Error;
use std::io;
use std::process::ExitCode;

use crate::agent::SocketError;
use crate::agent::preflight::ConfigRefusals;
use crate::identity::StartError;

// The exit codes of the command. Each code means one thing, whatever the verb.

/// How the command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// Done, and nothing needs fixing.
    Done = 0,
    /// Something needs fixing, or failed.
    Failure = 1,
    /// The command line cannot be used. clap exits with this code too.
    Usage = 2,
    /// The time limit was over first.
    Late = 3,
    /// Another record, change or agent is in the way.
    Conflict = 4,
    /// No agent answers.
    NoAgent = 5,
    /// A permission is missing.
    Forbidden = 6,
    /// The agent knows nothing by this name.
    Unknown = 7,
    /// Nobody reads the output any more: what a shell reports of a program that SIGPIPE ends.
    Closed = 141,
}

/// An error with an exit code of its own.
#[derive(Debug, thiserror::Error)]
#[error("{text}")]
pub struct ExitError {
    exit: Exit,
    text: String,
}

impl ExitError {
    /// An error whose text names the fault and the remedy.
    #[must_use]
    pub fn new(exit: Exit, text: impl Into<String>) -> Self {
        Self { exit, text: text.into() }
    }
}

impl Exit {
    /// Each code.
    pub const ALL: [Self; 9] = [
        Self::Done,
        Self::Failure,
        Self::Usage,
        Self::Late,
        Self::Conflict,
        Self::NoAgent,
        Self::Forbidden,
        Self::Unknown,
        Self::Closed,
    ];

    /// What the code means.
    #[must_use]
    pub const fn meaning(self) -> &'static str {
        match self {
            Self::Done => "done, and nothing needs fixing",
            Self::Failure => "something needs fixing, or failed; the output says what",
            Self::Usage => "wrong options or arguments; nothing was done",
            Self::Late => "done, but not attached or acknowledged in time",
            Self::Conflict => "another record, change or agent is in the way; nothing was changed",
            Self::NoAgent => "no agent answers in the run directory",
            Self::Forbidden => "permission denied",
            Self::Unknown => "the agent knows nothing by this name",
            Self::Closed => "standard output was closed early, for example by `head`",
        }
    }

    /// The codes that a verb can end with. A verb of a group has the group's name in front: `event ls`.
    fn of_verb(verb: &str) -> Vec<Self> {
        let local = [Self::Done, Self::Failure, Self::Usage, Self::Forbidden, Self::Closed];
        let more: &[Self] = match verb {
            "libvirt-hook" => return vec![Self::Done],
            "xdp-imds" => return Self::ALL.into(),
            "serve" => &[Self::Conflict],
            "release" => &[Self::Conflict, Self::NoAgent],
            "ls" => &[Self::NoAgent],
            "status" | "top" => &[Self::NoAgent, Self::Unknown],
            "register" => &[Self::Late, Self::Conflict, Self::NoAgent],
            "event" | "event add" => &[Self::Late, Self::Conflict, Self::NoAgent, Self::Unknown],
            "get" | "rm" | "clear" | "trace" | "event cancel" | "event ls" => {
                &[Self::Conflict, Self::NoAgent, Self::Unknown]
            }
            _ => &[],
        };
        Self::ALL.into_iter().filter(|exit| local.contains(exit) || more.contains(exit)).collect()
    }

    fn of_status(status: u16) -> Self {
        match status {
            403 => Self::Forbidden,
            404 => Self::Unknown,
            409 | 412 => Self::Conflict,
            504 => Self::Late,
            _ => Self::Failure,
        }
    }

    /// The code of an agent's refusal, or of no answer.
    #[must_use]
    pub fn of_failure(failure: &RegistrationError) -> Self {
        match failure {
            RegistrationError::Client(error) => Self::of_client(error),
            RegistrationError::Problem(problem) => Self::of_status(problem.status),
            RegistrationError::Strange { .. } => Self::Failure,
        }
    }

    fn of_client(error: &ClientError) -> Self {
        match error {
            ClientError::NoAgent { .. } | ClientError::Mute(_) => Self::NoAgent,
            ClientError::Forbidden { .. } => Self::Forbidden,
            ClientError::Refused { status, .. } => Self::of_status(*status),
        }
    }

    /// The code of an error, by its causes.
    #[must_use]
    pub fn of_error(error: &anyhow::Error) -> Self {
        error.chain().find_map(Self::of_cause).unwrap_or(Self::Failure)
    }

    fn of_cause(cause: &(dyn Error + 'static)) -> Option<Self> {
        if let Some(error) = cause.downcast_ref::<ExitError>() {
            return Some(error.exit);
        }
        if let Some(client) = cause.downcast_ref() {
            return Some(Self::of_client(client));
        }
        if let Some(failure) = cause.downcast_ref() {
            return Some(Self::of_failure(failure));
        }
        if is_other_agent(cause) {
            return Some(Self::Conflict);
        }
        let io = match cause.downcast_ref() {
            // It shares the kernel's error, so that this is no cause of its own.
            Some(FeedError::Io { error, .. }) => Some(error.kind()),
            _ => cause.downcast_ref::<io::Error>().map(io::Error::kind),
        };
        let errno = cause.downcast_ref::<Errno>();
        let is_denied = io == Some(io::ErrorKind::PermissionDenied)
            || errno.is_some_and(|errno| matches!(*errno, Errno::PERM | Errno::ACCESS))
            || cause.downcast_ref::<AfxdpError>().is_some_and(AfxdpError::is_lock_denied);
        // These have no cause: only texts of it were kept.
        let is_denied = is_denied
            || matches!(cause.downcast_ref(), Some(StartError::Denied(_)))
            || cause.downcast_ref::<ConfigRefusals>().is_some_and(ConfigRefusals::is_denied);
        is_denied.then_some(Self::Forbidden)
    }
}

/// True for the errors of an agent that finds another in its way.
fn is_other_agent(cause: &(dyn Error + 'static)) -> bool {
    // These errors share their causes, which are therefore not in the chain.
    let (pins, link) = match cause.downcast_ref() {
        Some(SteerError::Pins(pins)) => (Some(pins), None),
        Some(SteerError::Link(link)) => (None, Some(link)),
        _ => (cause.downcast_ref(), cause.downcast_ref()),
    };
    matches!(pins, Some(PinsError::InUse { .. }))
        || matches!(link, Some(LinkError::HubInUse { .. }))
        || matches!(cause.downcast_ref(), Some(SocketError::Taken { .. }))
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}

/// The exit codes of a verb with their meanings. Name a verb of a group with the group: `event ls`.
pub fn exit_codes(verb: &str) -> impl Iterator<Item = (u8, &'static str)> {
    // libvirt takes any other code as a refusal.
    let always = (verb == "libvirt-hook").then_some("always, even after a failure, which the log names");
    Exit::of_verb(verb).into_iter().map(move |exit| (exit as u8, always.unwrap_or(exit.meaning())))
}

/// Adds the exit codes to the end of the long help of a command and of each of its verbs.
#[must_use]
pub fn with_exit_codes(command: Command) -> Command {
    let name = command.get_name().to_owned();
    with_exit_codes_of(command, &name).mut_subcommands(|verb| {
        let name = verb.get_name().to_owned();
        with_exit_codes_of(verb, &name).mut_subcommands(|of_group| {
            let name = format!("{name} {}", of_group.get_name());
            with_exit_codes_of(of_group, &name)
        })
    })
}

fn with_exit_codes_of(command: Command, verb: &str) -> Command {
    let lines: String = exit_codes(verb).map(|(code, text)| format!("\n  {code:>3}  {text}")).collect();
    let before = command.get_after_long_help().map(|help| format!("{help}\n\n")).unwrap_or_default();
    command.after_long_help(format!("{before}Exit status:{lines}"))
}

#[cfg(test)]
mod tests {
    use anyhow::{Context as _, anyhow};
    use metadata_control::instances::{ApiProblem, RegistrationError};
    use metadata_control::status::ClientError;
    use std::collections::HashSet;
    use std::io;

    use crate::agent::preflight::ConfigRefusal;

    use super::{
        AfxdpError, Command, ConfigRefusals, Exit, FeedError, LinkError, PinsError, SocketError, StartError,
        SteerError, exit_codes, with_exit_codes,
    };

    fn denied() -> io::Error {
        io::Error::from_raw_os_error(libc::EPERM)
    }

    #[test]
    fn each_failure_has_its_exit_code() {
        let problem = |status| {
            let (kind, title, detail) = Default::default();
            let (conflict, registered) = (None, None);
            RegistrationError::Problem(
                ApiProblem { kind, title, status, detail, conflict, registered }.into(),
            )
        };
        let client = |error: ClientError| RegistrationError::Client(error);
        let absent = || io::Error::from(io::ErrorKind::NotFound);
        for (failure, expected) in [
            (problem(422), Exit::Failure),
            (problem(403), Exit::Forbidden),
            (problem(404), Exit::Unknown),
            (problem(409), Exit::Conflict),
            (problem(412), Exit::Conflict),
            (problem(504), Exit::Late),
            (client(ClientError::NoAgent { path: "/".into(), source: absent() }), Exit::NoAgent),
            (client(ClientError::Mute(absent())), Exit::NoAgent),
            (client(ClientError::Forbidden { path: "/".into(), source: denied() }), Exit::Forbidden),
        ] {
            assert_eq!(Exit::of_failure(&failure), expected, "{failure:?}");
            let name = format!("{failure:?}");
            assert_eq!(Exit::of_error(&anyhow::Error::from(failure).context("more")), expected, "{name}");
        }
    }

    #[test]
    fn another_agent_in_the_way_is_a_conflict() {
        let pins = || PinsError::InUse { path: "/pins".into() };
        let hub = || LinkError::HubInUse { name: "hub".into() };
        for error in [
            anyhow::Error::from(pins()),
            SteerError::Pins(pins()).into(),
            SteerError::Link(hub()).into(),
            hub().into(),
            SocketError::Taken { path: "/run".into() }.into(),
        ] {
            assert_eq!(Exit::of_error(&error), Exit::Conflict, "{error:?}");
            assert_eq!(Exit::of_error(&error.context("more")), Exit::Conflict);
        }
        assert!(pins().to_string().contains("`systemctl reload xdp-imds`"));
    }

    fn refusal(is_denied: bool) -> ConfigRefusal {
        let (name, expected) = ("metrics", "an address of this node and a free port");
        ConfigRefusal {
            name,
            found: "it cannot be used".into(),
            expected,
            remedy: "Correct it".into(),
            is_denied,
        }
    }

    #[test]
    fn a_missing_permission_is_found_below_other_errors() {
        let path = || "/x".into();
        for error in [
            anyhow::Error::from(denied()),
            LinkError::device("make a tap", denied()).into(),
            FeedError::Io { path: path(), expected: "a file", error: std::sync::Arc::new(denied()) }.into(),
            anyhow::Error::from(rustix::io::Errno::ACCESS).context("reading"),
            anyhow::Error::from(AfxdpError::Open(rustix::io::Errno::PERM)).context("binding the sockets"),
            anyhow::Error::from(AfxdpError::Memory { source: rustix::io::Errno::NOBUFS })
                .context("binding the sockets"),
            StartError::Denied("cannot read /keys".into()).into(),
            ConfigRefusals(vec![refusal(false), refusal(true)]).into(),
        ] {
            assert_eq!(Exit::of_error(&error), Exit::Forbidden, "{error:?}");
        }
        let missing = Err::<(), _>(io::Error::from(io::ErrorKind::NotFound)).context("reading");
        assert_eq!(Exit::of_error(&missing.expect_err("missing")), Exit::Failure);
        assert_eq!(Exit::of_error(&anyhow!("nothing else")), Exit::Failure);
        let memory = AfxdpError::Memory { source: rustix::io::Errno::NOMEM };
        assert_eq!(Exit::of_error(&memory.into()), Exit::Failure, "no memory is no missing permission");
        let refused = ConfigRefusals(vec![refusal(false)]);
        assert_eq!(refused.to_string(), refusal(false).to_string());
        assert_eq!(Exit::of_error(&refused.into()), Exit::Failure);
    }

    #[test]
    fn the_exit_codes_of_a_verb_are_those_that_it_can_mean() {
        for (verb, expected) in [
            ("xdp-imds", &[0, 1, 2, 3, 4, 5, 6, 7, 141][..]),
            ("release", &[0, 1, 2, 4, 5, 6, 141]),
            ("status", &[0, 1, 2, 5, 6, 7, 141]),
            ("trace", &[0, 1, 2, 4, 5, 6, 7, 141]),
            ("register", &[0, 1, 2, 3, 4, 5, 6, 141]),
            ("ls", &[0, 1, 2, 5, 6, 141]),
            ("check", &[0, 1, 2, 6, 141]),
            ("serve", &[0, 1, 2, 4, 6, 141]),
            ("event add", &[0, 1, 2, 3, 4, 5, 6, 7, 141]),
            ("event cancel", &[0, 1, 2, 4, 5, 6, 7, 141]),
            ("event ls", &[0, 1, 2, 4, 5, 6, 7, 141]),
            ("libvirt-hook", &[0]),
        ] {
            assert_eq!(exit_codes(verb).map(|(code, _)| code).collect::<Vec<_>>(), expected, "{verb}");
        }
    }

    #[test]
    fn the_help_of_a_verb_of_a_group_has_its_own_exit_codes() {
        let group = Command::new("event").subcommand(Command::new("ls")).subcommand(Command::new("add"));
        let all = with_exit_codes(Command::new("xdp-imds").subcommand(Command::new("ls")).subcommand(group));
        let help = |words: &[&str]| {
            let found = words.iter().try_fold(&all, |command, word| command.find_subcommand(word));
            found.and_then(Command::get_after_long_help).expect("a help").to_string()
        };
        let has = |words: &[&str], exit: Exit| help(words).contains(exit.meaning());
        assert!(has(&["event", "ls"], Exit::Unknown) && !has(&["ls"], Exit::Unknown));
        assert!(has(&["event", "add"], Exit::Late) && !has(&["event", "ls"], Exit::Late));
        for words in [&[][..], &["event"], &["event", "ls"]] {
            assert_eq!(help(words).matches("Exit status:").count(), 1, "{words:?}");
        }
    }

    #[test]
    fn no_two_exits_share_a_code_or_a_meaning() {
        let codes: HashSet<_> = Exit::ALL.map(|exit| exit as u8).into();
        let meanings: HashSet<_> = Exit::ALL.map(Exit::meaning).into();
        assert_eq!((codes.len(), meanings.len()), (Exit::ALL.len(), Exit::ALL.len()));
    }
}
