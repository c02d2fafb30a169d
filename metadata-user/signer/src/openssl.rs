//! The program `openssl` makes certificates for tests, and verifies what they sign. Tests skip without it.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::documents::{CertificateFiles, OwnCertificate};

/// A directory with a root's certificate, and a key with a certificate that the root signed.
pub(crate) struct Operator {
    room: tempfile::TempDir,
}

fn run(room: &Path, arguments: &str) -> Option<Vec<u8>> {
    let output = Command::new("openssl").args(arguments.split(' ')).current_dir(room).output().ok()?;
    output.status.success().then_some(output.stdout)
}

impl Operator {
    /// Makes the files; `None` without `openssl`.
    pub(crate) fn or_skip() -> Option<Self> {
        let room = tempfile::tempdir().expect("a directory");
        if run(room.path(), "version").is_none() {
            println!("skipped: there is no `openssl`");
            return None;
        }
        let operator = Self { room };
        operator
            .run("req -x509 -newkey rsa:2048 -nodes -keyout root.key -out root.pem -subj /CN=root -days 2");
        operator.issue("own");
        Some(operator)
    }

    /// Makes another key and certificate with this name.
    pub(crate) fn issue(&self, name: &str) {
        self.run(&format!("req -newkey rsa:2048 -nodes -keyout {name}.key -out {name}.csr -subj /CN={name}"));
        let signed = "-CA root.pem -CAkey root.key -CAcreateserial -days 1";
        self.run(&format!("x509 -req -in {name}.csr {signed} -out {name}.pem"));
        let chain = [format!("{name}.pem"), "root.pem".to_owned()];
        let chain = chain.map(|file| fs::read_to_string(self.path(&file)).expect("read"));
        fs::write(self.path(&format!("{name}.chain")), chain.concat()).expect("written");
        self.make_private(&format!("{name}.key"));
    }

    pub(crate) fn make_private(&self, file: &str) {
        fs::set_permissions(self.path(file), Permissions::from_mode(0o600)).expect("private");
    }

    pub(crate) fn path(&self, file: &str) -> PathBuf {
        self.room.path().join(file)
    }

    pub(crate) fn files(&self) -> CertificateFiles {
        CertificateFiles { chain: self.path("own.chain"), key: self.path("own.key") }
    }

    pub(crate) fn certificate(&self) -> OwnCertificate {
        OwnCertificate::read(self.files()).expect("a certificate")
    }

    /// Runs a command that must succeed.
    pub(crate) fn run(&self, arguments: &str) -> Vec<u8> {
        self.verify(arguments).expect(arguments)
    }

    /// Runs a command; `None` if it fails.
    pub(crate) fn verify(&self, arguments: &str) -> Option<Vec<u8>> {
        run(self.room.path(), arguments)
    }

    pub(crate) fn write(&self, file: &str, bytes: impl AsRef<[u8]>) {
        fs::write(self.path(file), bytes).expect("written");
    }
}
