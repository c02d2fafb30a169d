//! An operator's certificate authority, by OpenSSL.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Runs OpenSSL in a directory; returns what it prints.
pub(crate) fn openssl(directory: &Path, words: &[&str]) -> Output {
    Command::new("openssl").current_dir(directory).args(words).output().expect("openssl runs")
}

/// An authority, and the certificate that it issued to a node.
pub(crate) struct Authority(tempfile::TempDir);

impl Authority {
    /// Creates an authority and a certificate that is valid for some days.
    pub(crate) fn new(days: u32) -> Self {
        let authority = Self(tempfile::tempdir().expect("a directory"));
        authority
            .run("req -x509 -newkey rsa:2048 -nodes -keyout root.key -out root.pem -subj /CN=root -days 99");
        authority.issue(days);
        authority
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }

    fn run(&self, words: &str) {
        let output = openssl(self.path(), &words.split(' ').collect::<Vec<_>>());
        assert!(output.status.success(), "{words}: {}", String::from_utf8_lossy(&output.stderr));
    }

    /// Issues a certificate with a new key, in the place of the last one.
    pub(crate) fn issue(&self, days: u32) {
        self.run("req -new -newkey rsa:2048 -nodes -keyout next.key -out node.csr -subj /CN=metadata");
        self.run(&format!("x509 -req -in node.csr -CA root.pem -CAkey root.key -days {days} -out node.pem"));
        let read = |name: &str| fs::read_to_string(self.path().join(name)).expect("a file");
        fs::write(self.path().join("next.pem"), read("node.pem") + &read("root.pem")).expect("written");
        fs::set_permissions(self.path().join("next.key"), Permissions::from_mode(0o600)).expect("private");
        for (from, to) in [("next.pem", "chain.pem"), ("next.key", "chain.key")] {
            fs::rename(self.path().join(from), self.path().join(to)).expect("renamed");
        }
    }

    /// Returns the chain's file and the key's file.
    pub(crate) fn files(&self) -> [PathBuf; 2] {
        ["chain.pem", "chain.key"].map(|name| self.path().join(name))
    }

    /// Returns `certificate` of the agent's configuration.
    pub(crate) fn field(&self) -> String {
        let [chain, key] = self.files();
        format!("certificate: {{chain: '{}', key: '{}'}}", chain.display(), key.display())
    }
}
