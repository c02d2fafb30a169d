//! Says what firmware and network must give the guests of each datasource that the records name. The agent sees neither, so
//! these checks never fail.

use super::super::{Check, Facts};
use super::count;

/// One check for each value of `serve.smbios` in the records.
pub(super) fn checks(facts: &Facts) -> Vec<Check> {
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

#[cfg(test)]
mod tests {
    use super::needs;
    use metadata_content::record::Smbios;

    #[test]
    fn each_datasource_of_smbios_has_its_needs() {
        for stamp in Smbios::all() {
            assert!(needs(stamp).is_some(), "{stamp}");
        }
        assert!(
            needs("cloudstack").is_some_and(|needs| needs.contains("data-server") && needs.contains("54"))
        );
    }
}
