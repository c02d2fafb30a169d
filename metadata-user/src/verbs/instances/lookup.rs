//! Which instance a user means by a name, and what a user is told whose name is none's.

use metadata_content::source::RecordSource;
use metadata_control::instances::{self, ApiProblem, Instance, RegistrationError, is_name};
use std::path::Path;

/// Most instances that an error names.
const CANDIDATES_NAMED: usize = 4;

/// Whether a user means an instance by a name.
type IsMeant = fn(&Instance, &str) -> bool;

/// Whether a verb that changes something may take an instance for the one that a user names. A tenant chooses the name,
/// the UUID and the MACs of its VM, and may choose those of another: only the instance's own name counts there.
pub(in super::super) fn is_changeable(instance: &Instance, name: &str) -> bool {
    if instance.source.is_of_tenants() { instance.is_named(name) } else { instance.is_called(name) }
}

/// The source and the name of the instance that a user means, of `source` or of any: the registration of this name; else
/// the only instance that `is_meant` by it.
pub(in super::super) fn find(
    run: &Path,
    source: Option<RecordSource>,
    name: &str,
    is_meant: IsMeant,
) -> Result<(RecordSource, String), RegistrationError> {
    // Names of files and VMs may have other letters than those of registrations.
    if is_name(name) && source.is_none_or(|source| source == RecordSource::Api) {
        match instances::look(run, RecordSource::Api, name) {
            Err(failure) if failure.status() == Some(404) => {}
            looked => return looked.map(|_| (RecordSource::Api, name.to_owned())),
        }
    }
    meant(&instances::list(run, source)?, source, name, is_meant)
}

/// The only one of these instances that `is_meant` by a name.
fn meant(
    instances: &[Instance],
    source: Option<RecordSource>,
    name: &str,
    is_meant: IsMeant,
) -> Result<(RecordSource, String), RegistrationError> {
    let found: Vec<_> = instances.iter().filter(|instance| is_meant(instance, name)).collect();
    match &found[..] {
        [] => Err(match instances.iter().find(|instance| instance.is_called(name)) {
            Some(of_tenant) => called_by_tenant(of_tenant, name),
            None => unknown(source, name),
        }),
        [instance] => Ok((instance.source, instance.name.clone())),
        several => {
            let named = several.iter().take(CANDIDATES_NAMED);
            let named: Vec<_> = named
                .map(|instance| format!("`--source {} {}`", instance.source.name(), instance.name))
                .collect();
            Err(RegistrationError::Problem(Box::new(ApiProblem {
                kind: "urn:xdp-imds:ambiguous".into(),
                title: "several instances have this name".into(),
                status: 409,
                detail: format!(
                    "{} instances are called {name}: name one with {}",
                    several.len(),
                    named.join(", ")
                ),
                conflict: None,
                registered: None,
            })))
        }
    }
}

/// The error for a name that no instance has, in this source or in any.
fn unknown(source: Option<RecordSource>, name: &str) -> RegistrationError {
    let detail = match source.map(RecordSource::name) {
        None => format!(
            "no instance is called `{name}`: give a name of `xdp-imds ls`, or the name, UUID, port or MAC of a VM"
        ),
        Some(source) => format!(
            "no instance of the source {source} is called `{name}`: `xdp-imds ls --source {source}` lists those there are"
        ),
    };
    RegistrationError::Problem(Box::new(ApiProblem {
        kind: "urn:xdp-imds:absent".into(),
        title: "No such instance".into(),
        status: 404,
        detail,
        conflict: None,
        registered: None,
    }))
}

/// Only a tenant calls its VM so.
fn called_by_tenant(instance: &Instance, name: &str) -> RegistrationError {
    let own = format!("{}/{}", instance.source.name(), instance.name);
    RegistrationError::Problem(Box::new(ApiProblem {
        kind: "urn:xdp-imds:absent".into(),
        title: "No such instance".into(),
        status: 404,
        detail: format!(
            "no instance is called `{name}`, but the VM of {own}, whose tenant chose that: name it as `{own}`"
        ),
        conflict: None,
        registered: None,
    }))
}

/// No registration has the name that was to be removed. Removing needs its own name, so that nothing else is removed;
/// if its VM is called so, the message has it.
pub(super) fn not_removable(run: &Path, name: &str) -> RegistrationError {
    let absent = unknown(Some(RecordSource::Api), name);
    let called = instances::list(run, None).unwrap_or_default().into_iter().find(|one| one.is_called(name));
    match (absent, called) {
        (
            RegistrationError::Problem(mut problem),
            Some(Instance { source: RecordSource::Api, name: own, .. }),
        ) => {
            problem.detail =
                format!("no instance is called `{name}`, but a VM: `xdp-imds rm {own}` removes its record");
            RegistrationError::Problem(problem)
        }
        (RegistrationError::Problem(mut problem), Some(Instance { source, name: own, .. })) => {
            let remedy = match source {
                RecordSource::File => "remove its file from the directory of records",
                _ => "which alone removes it",
            };
            problem.detail = format!(
                "`{name}` was not registered through the API: {}/{own} comes from the source {}, {remedy}",
                source.name(),
                source.name()
            );
            RegistrationError::Problem(problem)
        }
        (absent, _) => absent,
    }
}

/// The instance was found, and the agent knows no VM of it.
pub(super) fn nothing_written(source: RecordSource, name: &str) -> RegistrationError {
    let name = format!("{}/{name}", source.name());
    RegistrationError::Problem(Box::new(ApiProblem {
        kind: "urn:xdp-imds:absent".into(),
        title: "No good record".into(),
        status: 404,
        detail: format!(
            "{name} has no good record, so there is nothing of its guest to remove; `xdp-imds get {name}` says why"
        ),
        conflict: None,
        registered: None,
    }))
}

/// Says in the words of the command line that no instance has the name.
pub(super) fn or_unknown<T>(
    done: Result<T, RegistrationError>,
    source: Option<RecordSource>,
    name: &str,
) -> Result<T, RegistrationError> {
    done.map_err(|failure| if failure.status() == Some(404) { unknown(source, name) } else { failure })
}

#[cfg(test)]
mod tests {
    use super::super::tests::instance;
    use super::{is_changeable, meant};
    use metadata_content::source::RecordSource;
    use metadata_control::instances::{Instance, InstancePort, InstanceVm};

    #[test]
    fn an_instance_is_found_by_every_name_that_is_shown_of_it() {
        let file = || Instance {
            name: "web.yaml".into(),
            source: RecordSource::File,
            vm: Some(InstanceVm { name: "web-1".into(), uuid: "7C0F".into(), owner: "ours".into() }),
            ports: vec![InstancePort { port: "vnet0@ns".into(), ..instance().ports.remove(0) }],
            ..instance()
        };
        let other = || Instance {
            name: "other.yaml".into(),
            vm: Some(InstanceVm { name: "db".into(), uuid: "ff".into(), owner: String::new() }),
            ports: vec![],
            ..file()
        };
        let names = [
            "web.yaml",
            "file/web.yaml",
            "/etc/records.d/web.yaml",
            "web-1",
            "7c0f",
            "ours",
            "vnet0",
            "vnet0@ns",
            "52:54:00:00:00:01",
        ];
        for name in names {
            for is_meant in [Instance::is_called, is_changeable] {
                let found = meant(&[other(), file()], None, name, is_meant);
                assert_eq!(found.expect(name), (RecordSource::File, "web.yaml".to_owned()), "{name}");
            }
        }
        for name in ["", "web", "eb.yaml", "vnet", "api/web.yaml"] {
            let failure = meant(&[other(), file()], None, name, Instance::is_called).expect_err(name);
            assert_eq!(failure.status(), Some(404), "{name}");
        }
        let twin = || Instance { name: "twin.yaml".into(), ..file() };
        let two = meant(&[twin(), file()], None, "web-1", Instance::is_called);
        assert_eq!(two.expect_err("two").status(), Some(409));
    }

    #[test]
    fn what_a_tenant_calls_its_vm_changes_nothing() {
        let of = |source, name: &str| Instance { source, name: name.into(), ..instance() };
        let pretender = of(RecordSource::Kubevirt, "evil/web");
        for name in ["web-1", "7c0f", "vnet0", "52:54:00:00:00:01"] {
            let failure = meant(std::slice::from_ref(&pretender), None, name, is_changeable).expect_err(name);
            assert!(failure.to_string().contains("name it as `kubevirt/evil/web`"), "{name}: {failure}");
            // Nor does it stand in the way of the VM that the operator calls so.
            let found = meant(&[pretender.clone(), of(RecordSource::Hook, "own")], None, name, is_changeable);
            assert_eq!(found.expect(name), (RecordSource::Hook, "own".to_owned()), "{name}");
        }
        for name in ["evil/web", "kubevirt/evil/web"] {
            let found = meant(std::slice::from_ref(&pretender), None, name, is_changeable);
            assert_eq!(found.expect(name), (RecordSource::Kubevirt, "evil/web".to_owned()), "{name}");
        }
    }
}
