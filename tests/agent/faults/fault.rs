//! The faults, each of which begins and ends.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context as _, Result};
use rustix::process::{Pid, Resource, Rlimit, prlimit};
use support::netns::run;
use support::objects::detach_pinned;
use support::process::signal;

use super::node::Node;

/// A fault of the node that passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The file system of the state directory is full (ENOSPC).
    FullDisk,
    /// The file system of the state directory is read-only (EROFS).
    ReadOnlyDisk,
    /// The agent gets no more descriptors (EMFILE).
    NoDescriptors,
    /// The agent is stopped (SIGSTOP).
    Stopped,
    /// The bpffs is read-only.
    ReadOnlyBpffs,
    /// Somebody has detached the programs of all ports.
    DetachedLinks,
}

impl Fault {
    /// All faults.
    pub(crate) const ALL: [Self; 6] = [
        Self::FullDisk,
        Self::ReadOnlyDisk,
        Self::NoDescriptors,
        Self::Stopped,
        Self::ReadOnlyBpffs,
        Self::DetachedLinks,
    ];

    /// Whether guests are answered while it lasts.
    pub(crate) fn answers(self) -> bool {
        !matches!(self, Self::Stopped | Self::DetachedLinks)
    }

    /// Whether what guests write stays off the disk while it lasts.
    pub(crate) fn blocks_writes(self) -> bool {
        matches!(self, Self::FullDisk | Self::ReadOnlyDisk)
    }

    /// Begins the fault for the agent with this process id.
    pub(crate) fn begin(self, node: &Node, pid: u32) -> Result<Begun> {
        let process = Pid::from_raw(i32::try_from(pid)?);
        Ok(match self {
            Self::FullDisk => Begun::Filler(node.fill()?),
            Self::ReadOnlyDisk => remounted(node.state().to_owned())?,
            Self::ReadOnlyBpffs => remounted(node.bpffs.path().to_owned())?,
            Self::NoDescriptors => {
                let open = fs::read_dir(format!("/proc/{pid}/fd"))?.count() as u64;
                let limits = rustix::process::getrlimit(Resource::Nofile);
                let lower = Rlimit { current: Some(open), maximum: limits.maximum };
                Begun::Limit(process, prlimit(process, Resource::Nofile, lower)?)
            }
            Self::Stopped => {
                signal(pid, libc::SIGSTOP)?;
                Begun::Stopped(pid)
            }
            Self::DetachedLinks => {
                for link in node.bpffs.port_links() {
                    let path = node.bpffs.pins().join("v1/links").join(link);
                    detach_pinned(&path)?;
                }
                Begun::Detached(pid)
            }
        })
    }
}

fn remounted(path: PathBuf) -> Result<Begun> {
    run(Command::new("mount").args(["-o", "remount,ro"]).arg(&path))?;
    Ok(Begun::ReadOnly(path))
}

/// A fault that lasts. It ends on drop.
pub(crate) enum Begun {
    Filler(PathBuf),
    ReadOnly(PathBuf),
    Limit(Option<Pid>, Rlimit),
    Stopped(u32),
    Detached(u32),
}

impl Begun {
    fn end(&self) -> Result<()> {
        match self {
            Self::Filler(path) => fs::remove_file(path).context("the filler")?,
            Self::ReadOnly(path) => _ = run(Command::new("mount").args(["-o", "remount,rw"]).arg(path))?,
            // The agent may have ended meanwhile.
            Self::Limit(process, limit) => _ = prlimit(*process, Resource::Nofile, *limit),
            Self::Stopped(pid) => _ = signal(*pid, libc::SIGCONT),
            // Begins a comparison at once, instead of within a minute.
            Self::Detached(pid) => _ = signal(*pid, libc::SIGHUP),
        }
        Ok(())
    }
}

impl Drop for Begun {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            eprintln!("a fault does not end: {error:#}");
        }
    }
}
