//! `xdp-imds openstack`: takes over from Neutron's metadata agents.

use anyhow::{Context as _, ensure};
use clap::{Args, Subcommand};
use metadata_content::dialect::yaml_document;
use metadata_feed::openstack::DEFAULT_SECRET;
use metadata_feed::openstack::import::{FILES, NeutronSettings};
use std::io::Write;
use std::path::PathBuf;

/// Arguments of the verb.
#[derive(Args)]
pub struct OpenstackArgs {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Print the section `openstack` of the configuration that does what Neutron's metadata agent does.
    ///
    /// Reads ovn_agent.ini, neutron_ovn_metadata_agent.ini and metadata_agent.ini. If none of them is about OVN, and
    /// openvswitch_agent.ini or linuxbridge_agent.ini is there too, instances come from libvirt. Writes the secret to
    /// a file of mode 0600, and never prints it. A file with another secret stays.
    Import {
        /// Neutron's files; later ones override earlier ones [default: those of them below /etc/neutron].
        #[arg(value_name = "FILE")]
        files: Vec<PathBuf>,
        /// The file for the secret.
        #[arg(long, value_name = "FILE", default_value = DEFAULT_SECRET)]
        secret: PathBuf,
    },
}

impl OpenstackArgs {
    /// Runs the verb. What needs a look goes to `remarks`.
    ///
    /// # Errors
    /// If a file cannot be read or written.
    pub fn run(self, out: &mut impl Write, remarks: &mut impl Write) -> anyhow::Result<()> {
        let Verb::Import { mut files, secret } = self.verb;
        if files.is_empty() {
            files = FILES.iter().map(PathBuf::from).filter(|path| path.exists()).collect();
            ensure!(
                !files.is_empty(),
                "expected one of {}, found none: name the files, such as the metadata_agent.ini of a network node",
                FILES.join(", ")
            );
        }
        let mut settings = NeutronSettings::read(&files).context("reading Neutron's configuration")?;
        settings.set_secret_file(secret.clone());
        let written = settings.write_secret(&secret).with_context(|| {
            format!("cannot write the secret to {}; --secret names another file", secret.display())
        })?;
        if written {
            writeln!(remarks, "the secret is in {}", secret.display())?;
        }
        for remark in settings.remarks() {
            writeln!(remarks, "{remark}")?;
        }
        // A block of YAML, because operators append it to their configuration.
        write!(out, "{}", yaml_document(&settings.section()))?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use std::fs;

    #[test]
    fn the_section_continues_a_configuration() {
        for (settings, url) in [
            ("[DEFAULT]\n", "http://127.0.0.1:8775"),
            (
                "[DEFAULT]\nnova_metadata_host = fd00::2\nnova_metadata_protocol = https\n\
                 [ovn]\novn_sb_connection = ssl:10.0.0.1:6642,ssl:[fd00::2]:6642\novn_sb_ca_cert = /etc/ovn/c #1.pem\n",
                "https://[fd00::2]:8775",
            ),
        ] {
            let room = tempfile::tempdir().expect("directory");
            let [neutron, config] = ["metadata_agent.ini", "config.yaml"].map(|name| room.path().join(name));
            fs::write(&neutron, settings).expect("settings");
            let verb = Verb::Import { files: vec![neutron], secret: room.path().join("secret") };
            let mut text = b"api: {}\n".to_vec();
            OpenstackArgs { verb }.run(&mut text, &mut Vec::new()).expect("import");
            fs::write(&config, text).expect("configuration");
            let openstack = Config::read(&config).expect("valid").openstack.expect("the section");
            assert_eq!(openstack.nova.url, url);
        }
    }
}
