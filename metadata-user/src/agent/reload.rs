//! On SIGHUP the agent reads the configuration and the records directory again, and applies the fields that can change
//! while guests are served.
//!
//! An unusable configuration changes nothing. Fields that need a restart or a takeover are not applied; the log lists
//! them. What a restart would refuse of them is a problem in the status until the next reload.

use anyhow::Context as _;
use serde_json::Value;
use tracing::{error, info, warn};

use super::preflight;
use crate::config::Config;
use crate::output::described;

/// The source of the configuration, and a callback for changes of it.
pub struct ConfigSource {
    /// Reads the configuration, with the arguments of the command line.
    pub read: Box<dyn Fn() -> anyhow::Result<Config>>,
    /// Called with a configuration once it is in force.
    pub applied: Box<dyn Fn(&Config)>,
}

impl ConfigSource {
    /// A configuration that never changes.
    #[must_use]
    pub fn fixed(config: &Config) -> Self {
        let config = config.clone();
        Self { read: Box::new(move || Ok(config.clone())), applied: Box::new(|_| {}) }
    }
}

/// The difference between two configurations.
#[derive(Debug, PartialEq)]
pub(super) struct ConfigChanges {
    /// The configuration to apply now: new fields where they can change, old fields elsewhere.
    pub(super) now: Config,
    /// Fields that differ and need a restart.
    pub(super) later: Vec<String>,
    /// Why a restart would fail with the configuration that was read.
    pub(super) refused_at_restart: Vec<String>,
}

impl ConfigChanges {
    /// Compares the configuration in force with one that was read.
    pub(super) fn between(old: &Config, new: &Config) -> Self {
        // Only a restart applies the other fields: the kernel's tables, the hubs and the workers depend on them.
        let now = Config {
            records: new.records.clone(),
            metadata: new.metadata,
            ports: new.ports.clone(),
            rotate_token_key_days: new.rotate_token_key_days,
            limits: new.limits,
            drain_seconds: new.drain_seconds,
            log: new.log.clone(),
            log_format: new.log_format,
            ..old.clone()
        };
        let later = differing(&now, new);
        let refused = preflight::refusals_of_restart(new, old);
        Self { now, later, refused_at_restart: refused.iter().map(ToString::to_string).collect() }
    }
}

/// The names of the fields in which two configurations differ.
fn differing(one: &Config, other: &Config) -> Vec<String> {
    match (serde_json::to_value(one), serde_json::to_value(other)) {
        (Ok(Value::Object(one)), Ok(Value::Object(other))) => {
            one.keys().filter(|name| one.get(*name) != other.get(*name)).cloned().collect()
        }
        // A path that is not UTF-8 has no JSON.
        _ if one == other => Vec::new(),
        _ => vec!["other fields".to_owned()],
    }
}

/// Reads the configuration again.
///
/// # Errors
/// The new configuration cannot be used. The reason is also logged.
pub(super) fn read(origin: &ConfigSource, old: &Config) -> Result<ConfigChanges, String> {
    let usable = || {
        let new = (origin.read)()?;
        if let Some(records) = &new.records {
            std::fs::read_dir(records).with_context(|| format!("cannot read {}", records.display()))?;
        }
        anyhow::Ok(new)
    };
    match usable() {
        Ok(new) => {
            let changes = ConfigChanges::between(old, &new);
            if changes.later.is_empty() {
                info!("configuration reloaded");
            } else {
                let fields = changes.later.join(", ");
                let keep =
                    if changes.later.len() == 1 { "keeps its old value" } else { "keep their old values" };
                warn!("configuration reloaded; {fields} {keep} until the agent is restarted");
            }
            for reason in &changes.refused_at_restart {
                error!("the agent would not start again with the configuration: {reason}");
            }
            Ok(changes)
        }
        Err(error) => {
            let reason = described(&error);
            error!("the configuration stays unchanged: {reason}");
            Err(reason)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{ConfigChanges, ConfigSource, read};
    use crate::config::Config;
    use crate::logging::LogFormat;

    #[test]
    fn fields_that_can_change_are_applied_and_the_others_are_named() {
        type Case = (&'static str, fn(&mut Config), bool);
        let cases: &[Case] = &[
            ("nothing", |_| {}, true),
            ("records", |c| c.records = Some("/elsewhere".into()), true),
            ("metadata", |c| c.metadata.keys = 1, true),
            ("ports", |c| c.ports = vec!["tap0".parse().expect("a port")], true),
            ("drain_seconds", |c| c.drain_seconds = 1, true),
            ("rotate_token_key_days", |c| c.rotate_token_key_days = 1, true),
            ("log", |c| c.log = Some("debug".into()), true),
            ("log_format", |c| c.log_format = LogFormat::Json, true),
            ("addresses", |c| _ = c.addresses.pop(), false),
            ("limits", |c| c.limits.burst = 1, true),
            ("state", |c| c.state = None, false),
            ("openstack", |c| c.openstack = Some(Default::default()), false),
            ("proxmox", |c| c.proxmox = Some(Default::default()), false),
            ("workers", |c| c.workers = 2, false),
            ("run", |c| c.run = "/elsewhere".into(), false),
            ("metrics", |c| c.metrics = Some("127.0.0.1:9".parse().expect("an address")), false),
            ("page_hosts", |c| c.page_hosts = vec!["node".into()], false),
            ("spin_us", |c| c.spin_us += 1, false),
            ("answer_without_agent_seconds", |c| c.answer_without_agent_seconds = 30, false),
            ("api", |c| c.api = Some(Default::default()), false),
            #[cfg(feature = "kubevirt")]
            ("kubevirt", |c| c.kubevirt = Some(Default::default()), false),
        ];
        for &(field, change, at_once) in cases {
            let (old, mut new) = (Config::default(), Config::default());
            change(&mut new);
            let ConfigChanges { now, later, .. } = ConfigChanges::between(&old, &new);
            assert_eq!(now == new, at_once, "{field}");
            assert_eq!(later, if at_once { vec![] } else { vec![field.to_owned()] });
            if !at_once {
                assert_eq!(now, old, "{field}");
            }
        }
    }

    #[test]
    fn a_reload_names_what_a_restart_would_refuse() {
        let directory = tempfile::tempdir().expect("a directory");
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("its address");
        let running = Config {
            records: Some(directory.path().into()),
            state: Some(directory.path().join("state")),
            run: directory.path().into(),
            ..Config::default()
        };
        let refused =
            |new: &Config, running: &Config| ConfigChanges::between(running, new).refused_at_restart;
        assert_eq!(refused(&running, &running), [""; 0]);
        let missing = directory.path().join("no/audit.log");
        let shown = missing.display().to_string();
        let address_shown = address.to_string();
        type Case<'a> = (&'a str, &'a dyn Fn(&mut Config));
        let cases: [Case<'_>; 3] = [
            ("no-such-group", &|c| c.api.get_or_insert_default().group = Some("no-such-group".into())),
            (&shown, &|c| c.audit.to = Some(missing.clone())),
            (&address_shown, &|c| c.metrics = Some(address)),
        ];
        for (named, change) in cases {
            let mut new = running.clone();
            change(&mut new);
            let reasons = refused(&new, &running);
            assert!(matches!(&reasons[..], [one] if one.contains(named)), "{named}: {reasons:?}");
        }
        // The agent itself has the address.
        let own = Config { metrics: Some(address), ..running };
        assert_eq!(refused(&own, &own), [""; 0]);
    }

    #[test]
    fn an_unusable_configuration_changes_nothing() {
        let old = Config::default();
        let refused = ConfigSource { read: Box::new(|| anyhow::bail!("no")), ..ConfigSource::fixed(&old) };
        assert_eq!(read(&refused, &old), Err("no".to_owned()));
        let nowhere = Config { records: Some("/does/not/exist".into()), ..old.clone() };
        assert!(
            read(&ConfigSource::fixed(&nowhere), &old).is_err_and(|error| error.contains("/does/not/exist"))
        );
        // The cause is named once.
        let absent = || Ok(Config::read("/does/not/exist.yaml".as_ref())?);
        let absent = ConfigSource { read: Box::new(absent), ..ConfigSource::fixed(&old) };
        let error = read(&absent, &old).expect_err("there is no such file");
        assert_eq!(error.matches("No such file").count(), 1, "{error}");
        assert!(read(&ConfigSource::fixed(&old), &old).is_ok());
    }
}
