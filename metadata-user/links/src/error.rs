//! Errors of devices and namespaces, with a remedy in each.

use std::io;

use crate::MAX_NAMESPACES;

/// Appended to an error that a kernel with more features would avoid.
pub const MISSING_FEATURE: &str = "; the kernel lacks a feature that this needs: `xdp-imds doctor` names it";

/// Why an operation on a device or a network namespace failed. No change is left half done.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LinkError {
    /// The namespace cannot be opened.
    #[error(
        "cannot open network namespace `{name}`: {source}{}; expected a name under /run/netns or an absolute \
         path such as /proc/4242/ns/net", of_another_user(.source)
    )]
    Namespace {
        /// The namespace, as named by the caller.
        name: String,
        /// The error of the kernel.
        source: io::Error,
    },
    /// The process has ended, and its PID belongs to another process now.
    #[error(
        "network namespace `{name}` belonged to another process, which has ended; its PID was reused; \
         name the namespace of the VM as it runs now, or remove it from the record and the configuration"
    )]
    AnotherProcess {
        /// The namespace, as named by the caller.
        name: String,
    },
    /// The namespace cannot be entered.
    #[error("cannot enter network namespace `{name}`: {source}{}", advice(.source))]
    Enter {
        /// The namespace, as named by the caller.
        name: String,
        /// The error of the kernel.
        source: io::Error,
    },
    /// Another process has the hub tap open.
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
        /// The attempted action, e.g. `create the veth pair imds-out and imds-in`.
        action: String,
        /// The error of the kernel.
        source: io::Error,
    },
    /// Every namespace number is in use.
    #[error("{MAX_NAMESPACES} network namespaces have ports, the most that one node can own")]
    TooManyNamespaces,
    /// The thread that enters a namespace could not be started.
    #[error("cannot start a thread: {source}; is the limit on tasks (ulimit -u, TasksMax) too low?")]
    Thread {
        /// The error of the kernel.
        source: io::Error,
    },
}

impl LinkError {
    /// An error of the kernel on a device; `action` completes "cannot".
    pub fn device(action: impl Into<String>, source: io::Error) -> Self {
        Self::Device { action: action.into(), source }
    }
}

/// The privilege to follow `/proc/PID/ns/net` of another user's process (ptrace(2), access mode checks).
fn of_another_user(error: &io::Error) -> &'static str {
    if error.kind() == io::ErrorKind::PermissionDenied {
        " (a process of another user requires CAP_SYS_PTRACE)"
    } else {
        ""
    }
}

/// The remedy for an errno that points at the machine rather than at the call.
#[must_use]
pub fn advice(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => {
            "; run as root, or with CAP_NET_ADMIN, CAP_NET_RAW, CAP_BPF, CAP_SYS_ADMIN and CAP_IPC_LOCK, and check \
             that no security module forbids bpf(2)"
        }
        Some(libc::EMFILE | libc::ENFILE) => {
            "; raise the limit on open files (LimitNOFILE): each port needs 1 descriptor, each namespace 1"
        }
        Some(libc::ENOSYS | libc::EOPNOTSUPP | libc::ENOPROTOOPT) => MISSING_FEATURE,
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
    fn a_kernel_without_a_feature_is_explained() {
        let error = LinkError::device("make a bpffs", io::Error::from_raw_os_error(libc::ENOSYS));
        assert!(
            error.to_string().contains("lacks a feature") && error.to_string().contains("doctor"),
            "{error}"
        );
    }
}
