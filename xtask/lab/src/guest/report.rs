//! The document the guest writes, and what can be read in it.

use serde::Deserialize;
use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::time::Duration;

/// How cloud-init's log announces each sleep before a retry (`url_helper.py`, 22.4 to 25.1).
const SLEEP: &str = "Please wait ";
/// Where the same log tells each attempt: `url_helper.py[DEBUG]: [1/6] open 'http://…'` is the second of six.
const ATTEMPT: &str = "url_helper.py[DEBUG]: [";
/// How it tells where the network configuration is from (`stages.py`).
const NETWORK: &str = "Applying network configuration from ";
/// The stages of a boot.
const STAGES: [&str; 4] = ["init-local", "init", "modules-config", "modules-final"];
/// Modules whose warnings are about this image, which has no SSH server and brings its NIC up by itself.
const OF_THE_IMAGE: [&str; 2] = ["activators.py", "cc_set_passwords.py"];

/// The document the image's `boot-report` writes.
#[derive(Debug, Deserialize)]
pub(super) struct GuestReport {
    /// Since the kernel started.
    pub(super) uptime_seconds: f64,
    /// Name and version of the cloud-init package.
    pub(super) package: String,
    /// What SMBIOS shows, by the kernel's names.
    pub(super) firmware: BTreeMap<String, String>,
    /// cloud-init's `result.json`; nothing when it did not finish.
    result: Option<Versioned<CloudInitResult>>,
    /// cloud-init's `status.json`.
    status: Option<Versioned<serde_json::Map<String, serde_json::Value>>>,
    pub(super) cloud_id: String,
    pub(super) instance_id: String,
    pub(super) hostname: String,
    /// By path.
    pub(super) authorized_keys: BTreeMap<String, String>,
    /// What user-data left, if it had any effect.
    pub(super) marker: Option<String>,
    /// By `ip -brief -4 address`.
    addresses: String,
    /// The file cloud-init configured the network in.
    pub(super) interfaces: String,
    /// Lines of cloud-init's log: requests, DHCP, network, warnings, errors.
    log: Vec<String>,
}

#[derive(Debug, Deserialize)]
struct Versioned<T> {
    v1: T,
}

#[derive(Debug, Deserialize)]
struct CloudInitResult {
    datasource: String,
    errors: Vec<String>,
}

impl GuestReport {
    /// The datasource class with its details, when cloud-init finished.
    pub(super) fn datasource(&self) -> Option<&str> {
        self.result.as_ref().map(|result| result.v1.datasource.as_str())
    }

    /// Errors cloud-init ended with; nothing when it did not finish.
    pub(super) fn errors(&self) -> Option<&[String]> {
        self.result.as_ref().map(|result| result.v1.errors.as_slice())
    }

    /// What cloud-init slept between retries of a request, in all.
    pub(super) fn retry_sleep(&self) -> Duration {
        let sleeps = self.log.iter().filter_map(|line| {
            let (_, rest) = line.split_once(SLEEP)?;
            rest.split(' ').next()?.parse::<f64>().ok()
        });
        Duration::from_secs_f64(sleeps.sum())
    }

    /// Attempts cloud-init made after a first one had failed.
    pub(super) fn further_attempts(&self) -> usize {
        let attempts = self.log.iter().filter_map(|line| line.split_once(ATTEMPT)?.1.split('/').next());
        attempts.filter(|number| *number != "0").count()
    }

    /// Where cloud-init had the network configuration from when it last applied one.
    pub(super) fn network_source(&self) -> Option<&str> {
        let sources = self.log.iter().rev().filter_map(|line| line.split_once(NETWORK)?.1.split(' ').next());
        // `ds` of some versions is the name of an enum's variant.
        sources.map(|word| word.rsplit('.').next().unwrap_or(word)).next()
    }

    /// The first address that is not the loopback's.
    pub(super) fn address(&self) -> Option<Ipv4Addr> {
        let nic = self.addresses.lines().find(|line| !line.starts_with("lo "))?;
        nic.split_whitespace().nth(2)?.split('/').next()?.parse().ok()
    }

    /// Warnings and errors in the log that metadata or the network may be to blame for, and the rest.
    pub(super) fn warnings(&self) -> (Vec<&str>, Vec<&str>) {
        let doubtful = self
            .log
            .iter()
            .map(String::as_str)
            .filter(|line| ["WARN", "ERROR", "CRITICAL"].iter().any(|level| line.contains(level)));
        doubtful.partition(|line| {
            // `2026-01-01 00:00:00,000 - module.py[WARNING]: …`
            let module = line.split(" - ").nth(1).and_then(|rest| rest.split('[').next());
            !OF_THE_IMAGE.contains(&module.unwrap_or_default())
        })
    }

    /// When each stage of cloud-init began and how long it took, by its `status.json`.
    pub(super) fn stages(&self) -> Vec<(f64, f64, &str)> {
        let Some(status) = &self.status else { return Vec::new() };
        let stages = status.v1.iter().filter_map(|(name, stage)| {
            let (start, finished) = (stage.get("start")?.as_f64()?, stage.get("finished")?.as_f64()?);
            Some((start, finished - start, name.as_str()))
        });
        let mut stages: Vec<_> = stages.collect();
        stages.sort_by(|one, other| one.0.total_cmp(&other.0));
        stages
    }

    /// Stages that did not come to their end.
    pub(super) fn unfinished(&self) -> Vec<&'static str> {
        let finished = self.stages();
        STAGES.into_iter().filter(|stage| !finished.iter().any(|(_, _, name)| name == stage)).collect()
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::GuestReport;
    use std::net::Ipv4Addr;
    use std::time::Duration;

    pub(in super::super) fn report(log: &[&str]) -> GuestReport {
        let document = serde_json::json!({
            "uptime_seconds": 40.0, "package": "cloud-init\t22.4.2", "cloud_id": "nocloud",
            "firmware": {"product_uuid": "7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d"},
            "result": {"v1": {"datasource": "DataSourceNoCloudNet", "errors": []}},
            "status": {"v1": {
                "stage": null,
                "modules-final": {"errors": [], "start": 30.0, "finished": 31.0},
                "init": {"errors": [], "start": 10.0, "finished": 12.5},
                "modules-init": {"errors": [], "start": null, "finished": null},
            }},
            "instance_id": "i", "hostname": "h", "authorized_keys": {}, "marker": null,
            "addresses": "lo    UNKNOWN  127.0.0.1/8\neth0  UP  10.0.2.20/16",
            "interfaces": "auto lo", "log": log,
        });
        serde_json::from_value(document).expect("a report")
    }

    #[test]
    fn sleeps_and_further_attempts_add_up_and_other_lines_do_not() {
        let quiet = report(&[
            "2026-01-01 00:00:00,000 - url_helper.py[DEBUG]: [0/11] open 'http://x/v1/meta-data' with {}",
            "2026-01-01 00:00:00,100 - url_helper.py[DEBUG]: Read from http://x/v1/meta-data (200, 9b) after 1 attempts",
        ]);
        assert_eq!((quiet.retry_sleep(), quiet.further_attempts()), (Duration::ZERO, 0));
        let slow = report(&[
            "t - url_helper.py[DEBUG]: [0/6] open 'http://x/openstack' with {}",
            "t - url_helper.py[DEBUG]: Please wait 1 seconds while we wait to try again",
            "t - url_helper.py[DEBUG]: [1/6] open 'http://x/openstack' with {}",
            "t - url_helper.py[DEBUG]: Please wait 0.5 seconds while we wait to try again",
            "t - url_helper.py[DEBUG]: [2/6] open 'http://x/openstack' with {}",
        ]);
        assert_eq!((slow.retry_sleep(), slow.further_attempts()), (Duration::from_millis(1_500), 2));
    }

    #[test]
    fn stages_come_in_the_order_they_began_and_missing_ones_are_named() {
        let report = report(&[]);
        let names: Vec<_> = report.stages().into_iter().map(|(_, took, name)| (name, took)).collect();
        assert_eq!(names, [("init", 2.5), ("modules-final", 1.0)]);
        assert_eq!(report.unfinished(), ["init-local", "modules-config"]);
    }

    #[test]
    fn the_network_configuration_that_was_applied_last_counts() {
        let report = report(&[
            "t - stages.py[INFO]: Applying network configuration from fallback bringup=False: {}",
            "t - stages.py[INFO]: Applying network configuration from ds bringup=True: {}",
        ]);
        assert_eq!(report.network_source(), Some("ds"));
        assert_eq!(report.address(), Some(Ipv4Addr::new(10, 0, 2, 20)));
    }

    #[test]
    fn only_warnings_about_the_image_are_set_apart() {
        let image = "t - cc_set_passwords.py[WARNING]: Ignoring config 'ssh_pwauth: None'.";
        let called = "t - DataSourceEc2.py[WARNING]: Calling 'http://x/latest/api/token' failed [0/120s]";
        let report = report(&[image, called, "t - url_helper.py[DEBUG]: [0/6] open 'http://x' with {}"]);
        assert_eq!(report.warnings(), (vec![called], vec![image]));
    }
}
