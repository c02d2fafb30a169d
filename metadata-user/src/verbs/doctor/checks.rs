//! Turns facts into checks. Each function here depends on its arguments only.

mod kernel;
mod node;
mod port;
mod privilege;
mod room;

#[cfg(test)]
mod tests;

use std::path::Path;

use metadata_signer::Algorithm;
use metadata_signer::directory::how_to_make;

use super::facts::{IdentityKeyFacts, IssuerFacts};
use super::{Check, DoctorRequest, Facts};
use crate::config::ConfigError;
use crate::verbs::options::DEFAULT_FILE;
pub(super) use privilege::{USER, user};
pub(super) use room::hidden;

/// Checks that the configuration can be used.
pub(super) fn configuration(question: &DoctorRequest) -> Check {
    let file = question.file.as_ref().map(|file| file.display().to_string());
    match (&question.config, file) {
        (Ok(_), None) if question.lacks_file => Check::fail(
            "configuration",
            format!("there is no {DEFAULT_FILE}, so no source of records is configured"),
            "the configuration of the service",
            "Put it there, or give the options of `serve`, such as --config FILE or --records DIR",
        ),
        (Ok(_), Some(file)) => Check::ok("configuration", format!("{file} can be used")),
        (Ok(_), None) => {
            Check::ok("configuration", "no configuration file is given; --config FILE names one")
        }
        (Err(error), _) => {
            let (expected, remedy) = match error {
                ConfigError::Read { .. } => {
                    ("a file that can be read", "Name the file with --config, or put it there")
                }
                ConfigError::Parse { .. } | ConfigError::Value { .. } => {
                    ("valid values", "Correct the configuration")
                }
            };
            let rest = "The checks below are of this machine: directories, records and ports are not checked";
            Check::fail("configuration", error.to_string(), expected, format!("{remedy}. {rest}"))
        }
    }
}

/// True for the checks of files and devices that the configuration names.
fn is_of_named(check: &str) -> bool {
    ["directory", "pins", "port", "records"].contains(&check.split('.').next().unwrap_or_default())
}

/// Adds all checks of facts to those of the configuration, which come first. A check comes after the checks that it
/// depends on. What an unusable configuration names is unknown, and not absent: its checks are left out.
pub(super) fn all(of_configuration: Vec<Check>, facts: &Facts, is_usable: bool) -> Vec<Check> {
    let mut of_facts = kernel::checks(facts);
    of_facts.extend(privilege::checks(facts));
    of_facts.extend(room::checks(facts));
    of_facts.extend(guest_checks(facts));
    of_facts.extend(node::checks(facts));
    of_facts.extend(facts.sources.iter().cloned());
    of_facts.extend(identity_checks(facts));
    of_facts.extend(port::checks(facts));
    let mut checks = of_configuration;
    checks.extend(of_facts.into_iter().filter(|check| is_usable || !is_of_named(check.name)));
    // The running agent reports faults of its configuration too.
    checks.extend(node::problems(&facts.node, &checks));
    checks
}

/// Returns a number with its noun: `one port`, `2 ports`.
fn count(number: usize, what: &str) -> String {
    if number == 1 { format!("one {what}") } else { format!("{number} {what}s") }
}

// Says what firmware and network must give the guests of each datasource that the records name. The agent sees neither, so
// these checks never fail.

/// One check for each value of `serve.smbios` in the records.
fn guest_checks(facts: &Facts) -> Vec<Check> {
    let check = |stamp: &str, records: usize| {
        let needs = needs(stamp)?;
        Some(
            Check::ok("guests", format!("{}, whose guests need {needs}", count(records, "record"))).of(stamp),
        )
    };
    // The agent has the records of all sources, and the directory is one of them.
    match &facts.node.datasources {
        Some(counts) => counts
            .iter()
            .filter_map(|(stamp, records)| check(stamp, usize::try_from(*records).unwrap_or(usize::MAX)))
            .collect(),
        None => {
            let stamps = facts.records.iter().flat_map(|records| &records.stamps);
            stamps.filter_map(|(stamp, records)| check(stamp, *records)).collect()
        }
    }
}

/// What the clients of a datasource need besides the service. The book has the same as a table.
fn needs(stamp: &str) -> Option<&'static str> {
    Some(match stamp {
        "nocloud" => "the SMBIOS serial `ds=nocloud;dsmode=net;s=http://169.254.169.254/v1/`, and addresses",
        "nocloud-net" => "the SMBIOS serial `ds=nocloud-net;s=http://169.254.169.254/v1/`, and addresses",
        "openstack" => "`OpenStack Nova` as SMBIOS product or chassis asset tag, and DHCP",
        "ec2" => "an SMBIOS UUID and serial that are equal and begin with `ec2`, and DHCP",
        "gce" => {
            "the SMBIOS product `Google Compute Engine`, DHCP, and DNS that resolves `metadata.google.internal` to \
             169.254.169.254"
        }
        "azure" => {
            "the SMBIOS chassis asset tag `7783-7084-3265-9085-8269-3286-77`, DHCP, and a route to 168.63.129.16 or DHCP \
             option 245"
        }
        "cloudstack" => {
            "the SMBIOS product `CloudStack KVM Hypervisor`, and 169.254.169.254 as the address of the name `data-server` in \
             DNS or as the DHCP server's identifier (option 54); else they ask the default gateway"
        }
        "exoscale" => "the SMBIOS product `Exoscale Compute Platform`, and DHCP",
        "aliyun" => "the SMBIOS product `Alibaba Cloud ECS`, and a route to 100.100.100.200",
        "scaleway" => "the SMBIOS manufacturer `Scaleway`, DHCP, and a route to 169.254.42.42",
        "digitalocean" => "the SMBIOS manufacturer `DigitalOcean`",
        "upcloud" => "the SMBIOS manufacturer `UpCloud`, and DHCP",
        "hetzner" => "the SMBIOS manufacturer `Hetzner` with a numeric serial, and DHCP",
        "vultr" => {
            "the SMBIOS manufacturer `Vultr` with a numeric serial, and DHCP, for cloud-init 22.4 with a route to \
             169.254.169.254/32 (option 121)"
        }
        "akamai" => "the SMBIOS manufacturer `Akamai` with a numeric serial, and DHCP",
        "nwcs" => "the SMBIOS manufacturer `NWCS`, and DHCP",
        "oracle" => "the SMBIOS chassis asset tag `OracleCloud.com`, and DHCP",
        "cloudcix" => "the SMBIOS product `CloudCIX`, and addresses",
        _ => return None,
    })
}

// Checks what the issuer of identity tokens needs: keys, and the certificate for documents.

/// Days before the certificate expires at which the check asks for another.
const CERTIFICATE_DAYS: u64 = 14;

fn identity_checks(facts: &Facts) -> Vec<Check> {
    let Some(IssuerFacts { directory, algorithm, keys, certificate }) = &facts.identity else {
        return Vec::new();
    };
    let certificate = certificate.as_ref().map(certificate_check);
    std::iter::once(keys_check(directory, *algorithm, keys)).chain(certificate).collect()
}

fn keys_check(directory: &Path, algorithm: Algorithm, keys: &Result<IdentityKeyFacts, String>) -> Check {
    let expected = format!("private keys for {algorithm} in files `*.pem` with mode 0600");
    let remedy = format!("As the user that runs the agent, {}", how_to_make(algorithm, directory));
    let directory = directory.display();
    match keys {
        // The agent does not start without a key.
        Ok(IdentityKeyFacts { count: 0, skipped, made_here: false }) if !skipped.is_empty() => Check::fail(
            "identity.keys",
            format!("{directory} has none for {algorithm}: {}", skipped.join("; ")),
            expected,
            remedy,
        ),
        Ok(IdentityKeyFacts { skipped, .. }) if !skipped.is_empty() => Check::warn(
            "identity.keys",
            skipped.join("; "),
            expected,
            "Mend or remove the files that are named",
        ),
        Ok(IdentityKeyFacts { count: 0, made_here: true, .. }) => {
            Check::ok("identity.keys", format!("{directory} is empty; the signer makes the first key"))
        }
        Ok(IdentityKeyFacts { count: 0, .. }) => {
            Check::fail("identity.keys", format!("{directory} has none"), expected, remedy)
        }
        Ok(keys) => Check::ok("identity.keys", format!("{} in {directory}", count(keys.count, "key"))),
        Err(reason) => Check::fail("identity.keys", reason.clone(), expected, remedy),
    }
}

fn certificate_check(certificate: &Result<Option<u64>, String>) -> Check {
    let name = "identity.certificate";
    match certificate {
        Ok(Some(days)) if *days >= CERTIFICATE_DAYS => {
            Check::ok(name, format!("valid for {}", count_days(*days)))
        }
        Ok(days) => Check::warn(
            name,
            days.map_or_else(|| "has expired".to_owned(), |days| format!("expires in {}", count_days(days))),
            format!("a certificate that is valid for {CERTIFICATE_DAYS} days or longer"),
            "Replace the files of `identity.certificate`. A running signer reads them again",
        ),
        Err(reason) => Check::fail(
            name,
            reason.clone(),
            "a chain in PEM, and its RSA key of 2,048 to 4,096 bits with mode 0600",
            "Correct `identity.certificate`, or remove it: documents of EC2 and Azure are then not signed",
        ),
    }
}

fn count_days(days: u64) -> String {
    count(usize::try_from(days).unwrap_or(usize::MAX), "day")
}
