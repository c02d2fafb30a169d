//! `xdp-imds release`: removes what an agent that has ended left in the kernel.

use std::io::Write;
use std::path::Path;

use metadata_common::printable::{Printable, counted};
use metadata_steer::{PinsError, RELEASE_GRACE, ReleaseSummary, release, release_hubs};

use super::{Exit, ExitError};

/// Removes the pins and the devices of hubs whose agent has ended, and prints what it removed. `pins` is `None` for an
/// agent that pins nothing.
///
/// # Errors
/// If an agent runs with these pins, unless `force`; if the kernel refuses.
pub fn run(pins: Option<&Path>, hub: &str, force: bool, out: &mut dyn Write) -> anyhow::Result<()> {
    match pins {
        Some(pins) => pinned(pins, &release(pins, force).map_err(|error| refusal(pins, error))?, out)?,
        None => {
            writeln!(out, "this agent pins nothing; the kernel removes its programs when it ends")?;
        }
    }
    // A running agent keeps its hubs, even with --force.
    match release_hubs(hub)? {
        0 => Ok(()),
        1 => Ok(writeln!(out, "removed the veth pair {hub}-… of one hub")?),
        hubs => Ok(writeln!(out, "removed the veth pairs {hub}-… of {hubs} hubs")?),
    }
}

fn pinned(pins: &Path, released: &ReleaseSummary, out: &mut dyn Write) -> anyhow::Result<()> {
    let ReleaseSummary { links, maps, agent_runs } = released;
    match (links, maps) {
        (0, 0) => writeln!(out, "nothing is pinned in {}", Printable(pins.display()))?,
        _ if *agent_runs => writeln!(
            out,
            "removed the pins of {} and {}; an agent runs and keeps the programs on their devices until it ends. If it \
             still runs in {} minutes, it pins everything again",
            counted(*links as u64, "program"),
            counted(*maps as u64, "map"),
            RELEASE_GRACE.as_secs() / 60
        )?,
        _ => writeln!(
            out,
            "removed {} from {}, and {}",
            counted(*links as u64, "program"),
            if *links == 1 { "its device" } else { "their devices" },
            counted(*maps as u64, "map")
        )?,
    }
    Ok(())
}

/// The error with the remedy of this verb: [`PinsError`] has those of an agent that starts.
fn refusal(pins: &Path, error: PinsError) -> anyhow::Error {
    let pins = pins.display();
    match error {
        PinsError::InUse { .. } => ExitError::new(
            Exit::Conflict,
            format!(
                "an agent runs with the pins in {pins}: stop it first, or add --force, after which its ports pass all \
                 frames once it ends"
            ),
        )
        .into(),
        PinsError::NoBpffs { .. } => ExitError::new(
            Exit::Failure,
            format!("nothing can be pinned in {pins}, which is not on a bpffs; \
                name the directory with --pins or --config"),
        )
        .into(),
        error => error.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::{Exit, refusal};
    use metadata_steer::PinsError;
    use std::path::Path;

    #[test]
    fn a_refusal_has_the_remedy_of_a_release() {
        let path = || "/pins".into();
        for (error, exit, remedy) in [
            (PinsError::InUse { path: path() }, Exit::Conflict, "--force"),
            (PinsError::NoBpffs { path: path() }, Exit::Failure, "--pins or --config"),
        ] {
            let error = refusal(Path::new("/pins"), error);
            let text = error.to_string();
            assert_eq!(Exit::of_error(&error), exit, "{text}");
            assert!(text.contains("/pins") && text.contains(remedy), "{text}");
            assert!(!text.contains("--takeover") && !text.contains("--no-pins"), "{text}");
        }
    }
}
