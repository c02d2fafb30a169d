//! What can go wrong with devices and namespaces, and what its reader can do about it.

use std::io;

use crate::netns::MAX_NAMESPACES;

/// What to add to an error that a newer kernel, or one with more options, would not have.
pub const REQUIRED_KERNEL: &str = "; Linux 5.15 or later is needed, with XDP sockets, taps and veth";

/// Why something could not be done with a device or in a network namespace; nothing is left half done.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LinkError {
    /// The namespace cannot be opened.
    #[error(
        "cannot open network namespace `{name}`: {source}{}; expected a name under /run/netns or an absolute \
         path such as /proc/4242/ns/net", of_another_user(.source)
    )]
    Namespace {
        /// The namespace as it was named.
        name: String,
        /// What the kernel said.
        source: io::Error,
    },
    /// The number of a process that has ended means another one by now.
    #[error(
        "network namespace `{name}` was that of another process, which has ended: its number was given to a new \
         one; name the namespace of the VM as it runs now, or remove it from the record and the configuration"
    )]
    AnotherProcess {
        /// The namespace as it was named.
        name: String,
    },
    /// The namespace cannot be entered.
    #[error("cannot enter network namespace `{name}`: {source}{}", advice(.source))]
    Enter {
        /// The namespace as it was named.
        name: String,
        /// What the kernel said.
        source: io::Error,
    },
    /// A device is alive under the name of the hub tap.
    #[error(
        "{name} is in use: another xdp-imds runs in this namespace with the same hub name; stop it, take over from \
         it with --takeover, or give this one another hub name"
    )]
    HubInUse {
        /// The hub tap's name.
        name: String,
    },
    /// The kernel refused a device operation.
    #[error("cannot {action}: {source}{}", advice(.source))]
    Device {
        /// What was tried, e.g. `create the veth pair imds-out and imds-in`.
        action: String,
        /// What the kernel said.
        source: io::Error,
    },
    /// More namespaces with ports than are numbered.
    #[error("{MAX_NAMESPACES} network namespaces have ports, as many as one node can own")]
    TooManyNamespaces,
    /// A thread of its own for a namespace could not be had.
    #[error("cannot start a thread: {source}; is the limit on tasks (ulimit -u, TasksMax) too low?")]
    Thread {
        /// What the kernel said.
        source: io::Error,
    },
}

impl LinkError {
    /// The kernel's answer to an operation on a device; `action` completes "cannot".
    pub fn device(action: impl Into<String>, source: io::Error) -> Self {
        Self::Device { action: action.into(), source }
    }
}

/// What it takes to follow `/proc/PID/ns/net` of a process of another user (ptrace(2), access mode checks).
fn of_another_user(error: &io::Error) -> &'static str {
    if error.kind() == io::ErrorKind::PermissionDenied {
        " (another user's process takes CAP_SYS_PTRACE)"
    } else {
        ""
    }
}

/// What to do about an errno that says more about the machine than about the call.
#[must_use]
pub fn advice(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => {
            "; run as root, or with CAP_NET_ADMIN, CAP_NET_RAW, CAP_BPF, CAP_SYS_ADMIN and CAP_IPC_LOCK, and see \
             that no security module forbids bpf(2)"
        }
        Some(libc::EMFILE | libc::ENFILE) => {
            "; raise the limit on open files (LimitNOFILE): each port needs 1 descriptor, each namespace 1"
        }
        Some(libc::ENOSYS | libc::EOPNOTSUPP | libc::ENOPROTOOPT) => REQUIRED_KERNEL,
        Some(libc::ENOMEM) => "; free memory, or raise this service's memory limit",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::LinkError;
    use std::io;

    #[test]
    fn a_missing_privilege_is_explained() {
        let error = LinkError::device("make a tap", io::Error::from_raw_os_error(libc::EPERM));
        assert!(error.to_string().contains("CAP_NET_ADMIN"), "{error}");
    }

    #[test]
    fn a_kernel_too_old_is_explained() {
        let error = LinkError::device("make a bpffs", io::Error::from_raw_os_error(libc::ENOSYS));
        assert!(error.to_string().contains("Linux 5.15"), "{error}");
    }
}
