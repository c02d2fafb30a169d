//! Configurations made by seed, and what qemu-server put on the drive of each. `drives.jsonl` was recorded by running
//! its `generate_cloudinit_config` (version 9.2.6, commit e6352be6) on files in a true pmxcfs.

use serde::Deserialize;

use super::super::drive::{Dns, DriveFormat};
use super::super::translate::nics;
use super::super::{ProxmoxOptions, VmConfig, translate};
use super::{RESOLV_CONF, given};
use metadata_content::record::RecordLimits;

const DRIVES: &str = include_str!("drives.jsonl");

/// A configuration, and what was recorded of its drive.
#[derive(Deserialize)]
struct Drive {
    vmid: u32,
    configuration: String,
    user_data: String,
    /// In the form of the drive.
    network: String,
    instance_id: String,
}

#[test]
fn recorded_drives_have_the_documents_that_are_served() {
    for line in DRIVES.lines() {
        let drive: Drive = serde_json::from_str(line).expect("a recorded drive");
        let (config, _) = VmConfig::parse(drive.configuration.as_bytes()).expect("a configuration");
        let made =
            translate(drive.vmid, &config, &given(), &ProxmoxOptions::default(), &RecordLimits::DEFAULT);
        let record = made.expect(&drive.configuration).record;
        let user_data = record.user_data.as_ref().and_then(|payload| payload.bytes()).expect("user-data");
        assert_eq!(str::from_utf8(&user_data), Ok(&*drive.user_data), "{}", drive.configuration);
        let dns = Dns::of_vm(&config, &Dns::of_host(RESOLV_CONF));
        let network = DriveFormat::of(&config).network(&nics(&config, &mut Vec::new()), &dns);
        assert_eq!(network, drive.network, "{}", drive.configuration);
        assert_eq!(record.instance_id(), drive.instance_id, "{}", drive.configuration);
    }
}
