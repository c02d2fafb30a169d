//! Reads the document that the guest writes.

use serde::Deserialize;
use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::time::Duration;

/// The text by which cloud-init's log announces a sleep before a retry (`url_helper.py`, 22.4 to 25.1).
const SLEEP: &str = "Please wait ";
/// The text by which the same log announces an attempt: `url_helper.py[DEBUG]: [1/6] open 'http://…'` is the second of
/// six.
const ATTEMPT: &str = "url_helper.py[DEBUG]: [";
/// The text by which it announces the source of the network configuration (`stages.py`).
const NETWORK: &str = "Applying network configuration from ";
/// The stages of cloud-init.
const STAGES: [&str; 4] = ["init-local", "init", "modules-config", "modules-final"];
/// Modules whose warnings are about this image, which has no SSH server and configures its NIC by itself.
const OF_THE_IMAGE: [&str; 2] = ["activators.py", "cc_set_passwords.py"];

/// The document that the image's `boot-report` writes.
#[derive(Debug, Deserialize)]
pub(super) struct GuestReport {
    /// Seconds since the kernel started.
    pub(super) uptime_seconds: f64,
    /// Name and version of the cloud-init package.
    pub(super) package: String,
    /// The values of SMBIOS, by the kernel's names.
    pub(super) firmware: BTreeMap<String, String>,
    /// cloud-init's `result.json`; `None` if it did not finish.
    result: Option<Versioned<CloudInitResult>>,
    /// cloud-init's `status.json`.
    status: Option<Versioned<serde_json::Map<String, serde_json::Value>>>,
    pub(super) cloud_id: String,
    pub(super) instance_id: String,
    pub(super) hostname: String,
    /// The content of authorized_keys files, by path.
    pub(super) authorized_keys: BTreeMap<String, String>,
    /// The content of the file that user-data writes; `None` if user-data had no effect.
    pub(super) marker: Option<String>,
    /// The output of `ip -brief -4 address`.
    addresses: String,
    /// The file with cloud-init's network configuration.
    pub(super) interfaces: String,
    /// Lines of cloud-init's log about requests, DHCP, the network, warnings and errors.
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
    /// Returns the datasource class with its details, if cloud-init finished.
    pub(super) fn datasource(&self) -> Option<&str> {
        self.result.as_ref().map(|result| result.v1.datasource.as_str())
    }

    /// Returns the errors in cloud-init's result; `None` if it did not finish.
    pub(super) fn errors(&self) -> Option<&[String]> {
        self.result.as_ref().map(|result| result.v1.errors.as_slice())
    }

    /// Returns the time that cloud-init slept between attempts, in total.
    pub(super) fn retry_sleep(&self) -> Duration {
        let sleeps = self.log.iter().filter_map(|line| {
            let (_, rest) = line.split_once(SLEEP)?;
            rest.split(' ').next()?.parse::<f64>().ok()
        });
        Duration::from_secs_f64(sleeps.sum())
    }

    /// Returns the number of attempts that cloud-init made after a first one failed.
    pub(super) fn further_attempts(&self) -> usize {
        let attempts = self.log.iter().filter_map(|line| line.split_once(ATTEMPT)?.1.split('/').next());
        attempts.filter(|number| *number != "0").count()
    }

    /// Returns the source of the network configuration that cloud-init applied last.
    pub(super) fn network_source(&self) -> Option<&str> {
        let sources = self.log.iter().rev().filter_map(|line| line.split_once(NETWORK)?.1.split(' ').next());
        // Some versions write `ds` as the name of an enum's variant.
        sources.map(|word| word.rsplit('.').next().unwrap_or(word)).next()
    }

    /// Returns the first address that is not the loopback's.
    pub(super) fn address(&self) -> Option<Ipv4Addr> {
        let nic = self.addresses.lines().find(|line| !line.starts_with("lo "))?;
        nic.split_whitespace().nth(2)?.split('/').next()?.parse().ok()
    }

    /// Returns the warnings and errors that metadata or the network may have caused, and the others.
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

    /// Returns start and duration of each stage of cloud-init, in seconds, with its name, from `status.json`.
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

    /// Returns the stages that did not finish.
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

    pub(crate) fn report(log: &[&str]) -> GuestReport {
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
    fn sleeps_and_further_attempts_are_added_up() {
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
    fn stages_are_sorted_by_their_start_and_missing_ones_are_named() {
        let report = report(&[]);
        let names: Vec<_> = report.stages().into_iter().map(|(_, took, name)| (name, took)).collect();
        assert_eq!(names, [("init", 2.5), ("modules-final", 1.0)]);
        assert_eq!(report.unfinished(), ["init-local", "modules-config"]);
    }

    #[test]
    fn the_network_configuration_applied_last_is_used() {
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
