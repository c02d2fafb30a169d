//! The peer pve-imds (github.com/wyattanderson/pve-imds), the metadata service for Proxmox VE: an AF_XDP socket, gVisor's
//! TCP stack and Go's HTTP server for each tap.
//!
//! No package has it, so the user names the program. It reads `/etc/pve`, so it runs in a mount namespace with an `/etc`
//! of its own. It makes its own documents of a VM's configuration: guests check their statuses and lengths only.

use super::process::{self, Answers, Server};
use super::{Page, Running, Scene, Subject, Tenant};
use anyhow::{Context as _, Result, ensure};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

/// The name of the subject in tables and files.
pub(crate) const NAME: &str = "pve-imds";
/// The paths that it serves as OpenStack's. It answers EC2's listing with nothing, so that cloud-init ends there.
const SERVED: [&str; 2] = ["/openstack", "/latest/meta-data/"];
/// Mounts the directory of `$1` as `/etc`, and then becomes the program.
const INSIDE: &str = r#"mount --bind "$1" /etc && shift && exec "$@""#;

/// The subject pve-imds.
pub(crate) struct PveImds {
    program: PathBuf,
    /// What it finds in `/etc`.
    etc: Option<TempDir>,
}

/// A running pve-imds.
struct Serving(Server);

impl PveImds {
    /// Describes a subject that runs `program`.
    pub(crate) fn new(program: &Path) -> Self {
        Self { program: program.to_owned(), etc: None }
    }
}

impl Subject for PveImds {
    fn name(&self) -> &'static str {
        NAME
    }

    fn version(&self) -> Result<String> {
        Ok(self.program.display().to_string())
    }

    fn makes_its_own_documents(&self) -> bool {
        true
    }

    fn prepare(&mut self, scene: &Scene<'_>) -> Result<()> {
        // It serves every tap that it finds, and would pay for those of larger cases too.
        let is_tap =
            |link: &&serde_json::Value| link["ifname"].as_str().is_some_and(|name| number(name).is_ok());
        let taps = scene.node.links()?.iter().filter(is_tap).count();
        ensure!(
            taps == scene.tenants.len(),
            "pve-imds serves all {taps} taps; use a run for each number of VMs"
        );
        let etc = tempfile::Builder::new().prefix("xdp-imds-storm-").tempdir()?;
        let pve = etc.path().join("pve");
        let machines = pve.join("qemu-server");
        std::fs::create_dir_all(&machines)?;
        for tenant in scene.tenants {
            let number = number(&tenant.tap)?;
            let file = machines.join(format!("{number}.conf"));
            std::fs::write(&file, configuration(number, tenant)?)
                .with_context(|| format!("cannot write {}", file.display()))?;
        }
        std::fs::create_dir(pve.join("local"))?;
        // It does not start without the node's key, which signs identity tokens.
        let mut openssl = Command::new("openssl");
        openssl.args(["genrsa", "-out"]).arg(pve.join("local/pve-ssl.key")).arg("2048");
        support::netns::run(&mut openssl)?;
        self.etc = Some(etc);
        Ok(())
    }

    fn start<'a>(&'a self, scene: &'a Scene<'a>) -> Result<Box<dyn Running + 'a>> {
        let etc = self.etc.as_ref().context("`prepare` was not called for pve-imds")?.path();
        // Each of these programs executes the next in its place, so the process id stays the same.
        let mut command = process::command("unshare", scene.pinned)?;
        command.args(["--mount", "--propagation", "private", "sh", "-c", INSIDE, "sh"]).arg(etc);
        command.arg(&self.program).args(["--emulate", "openstack", "--log_level", "warn"]);
        let log = etc.join("log");
        let ready = Answers::Attached(scene.tenants.len());
        Ok(Box::new(Serving(Server::start(NAME, scene.node, &mut command, log, &ready)?)))
    }
}

impl Running for Serving {
    fn pids(&self) -> Vec<u32> {
        self.0.pids()
    }

    fn stop(self: Box<Self>) -> Result<()> {
        self.0.end()
    }
}

/// Returns the VM's number, which is part of its tap's name on Proxmox VE.
fn number(tap: &str) -> Result<u32> {
    let digits = tap.strip_prefix("tap").and_then(|rest| rest.strip_suffix("i0"));
    digits
        .and_then(|digits| digits.parse().ok())
        .with_context(|| format!("pve-imds serves taps with names like tap100i0, not {tap}"))
}

/// Returns a VM's configuration as Proxmox VE writes it, with the user-data in the notes.
fn configuration(number: u32, tenant: &Tenant) -> Result<String> {
    let is_served =
        |page: &Page| page.method == "GET" && SERVED.iter().any(|path| page.path.starts_with(path));
    if let Some(page) = tenant.pages.iter().find(|page| !is_served(page)) {
        anyhow::bail!("pve-imds does not serve {} {}; use --dialect openstack-alone", page.method, page.path);
    }
    let user_data = tenant.pages.iter().find(|page| page.path.ends_with("/user_data"));
    let user_data = String::from_utf8(user_data.map(|page| page.body.to_vec()).unwrap_or_default())?;
    ensure!(!user_data.contains("-->"), "user-data with `-->` would end the comment that it is in");
    let mut text = String::new();
    for line in ["<!--#user-data"].into_iter().chain(user_data.lines()).chain(["-->"]) {
        writeln!(text, "#{}", line.replace('%', "%25").replace(':', "%3A"))?;
    }
    let mac = tenant.mac.to_string().to_uppercase();
    write!(
        text,
        "cores: 2\nmemory: 2048\nname: vm-{number}\nnet0: virtio={mac},bridge=vmbr0\nostype: l26\n\
         smbios1: uuid=00000000-0000-4000-8000-{number:012x}\n"
    )?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::super::{Page, Tenant};
    use super::{configuration, number};
    use bytes::Bytes;
    use metadata_common::mac::Mac;
    use std::net::Ipv4Addr;

    fn tenant(method: &str, path: &str, body: &'static str) -> Tenant {
        let page = Page {
            method: method.into(),
            path: path.into(),
            status: 200,
            content_type: String::new(),
            body: Bytes::from_static(body.as_bytes()),
        };
        Tenant {
            tap: "tap107i0".into(),
            mac: Mac([0xbc, 0x24, 0x11, 0, 0, 7]),
            address: Ipv4Addr::new(10, 0, 16, 7),
            pages: vec![page],
        }
    }

    #[test]
    fn a_vm_is_configured_as_on_proxmox_ve() {
        let tenant = tenant("GET", "/openstack/latest/user_data", "#cloud-config\nfqdn: \"100%\"\n");
        assert_eq!(
            configuration(107, &tenant).expect("a configuration"),
            "#<!--#user-data\n##cloud-config\n#fqdn%3A \"100%25\"\n#-->\n\
             cores: 2\nmemory: 2048\nname: vm-107\nnet0: virtio=BC:24:11:00:00:07,bridge=vmbr0\nostype: l26\n\
             smbios1: uuid=00000000-0000-4000-8000-00000000006b\n"
        );
    }

    #[test]
    fn requests_that_pve_imds_has_no_document_for_are_refused_before_the_start() {
        let refused = [
            ("GET", "/v1/user-data", "", "does not serve GET /v1/user-data"),
            ("PUT", "/latest/api/token", "", "does not serve PUT"),
            ("GET", "/latest/meta-data/", "", ""),
            ("GET", "/openstack/latest/user_data", "a --> b", "would end the comment"),
        ];
        for (method, path, body, says) in refused {
            let outcome = configuration(107, &tenant(method, path, body));
            let error = outcome.err().map(|error| error.to_string()).unwrap_or_default();
            assert_eq!(error.is_empty(), says.is_empty(), "{path}: {error}");
            assert!(error.contains(says), "{path}: {error}");
        }
    }

    #[test]
    fn only_names_of_proxmox_ves_taps_have_a_vms_number() {
        assert_eq!(number("tap107i0").expect("a number"), 107);
        for tap in ["storm7", "tap107i1", "tapi0", "tap-1i0"] {
            assert!(number(tap).is_err(), "{tap}");
        }
    }
}
