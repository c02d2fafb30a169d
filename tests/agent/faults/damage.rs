//! Damaged files of the state directory: before a start, while an agent runs, and before a takeover.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use support::eventually::eventually;
use support::record::Identity;

use super::node::{Node, PATIENCE};

/// A file of the state directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Damage {
    TokenKeys,
    Mailbox,
    Dialects,
    Snapshot,
    Registration,
}

/// When the file is damaged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Moment {
    /// After an agent stopped, before the next one starts.
    BeforeStart,
    /// While an agent runs, which is killed afterwards.
    Running,
    /// While an agent runs, from which another one takes over.
    BeforeTakeover,
}

impl Damage {
    pub(crate) const ALL: [Self; 5] =
        [Self::TokenKeys, Self::Mailbox, Self::Dialects, Self::Snapshot, Self::Registration];

    fn path(self, node: &Node) -> Result<PathBuf> {
        let state = node.state();
        Ok(match self {
            Self::TokenKeys => state.join("token.key"),
            Self::Mailbox => node.mailbox(0)?,
            Self::Dialects => state.join("dialects"),
            Self::Snapshot => state.join("records.snapshot"),
            Self::Registration => {
                let mut entries = fs::read_dir(state.join("instances"))?;
                entries.next().context("no registration is on disk")??.path()
            }
        })
    }

    /// What the next agent says of the file. A snapshot is read only while its source is unavailable.
    fn is_named_by(self) -> Option<&'static str> {
        match self {
            Self::TokenKeys => Some("the file is set aside, and written anew"),
            Self::Mailbox => Some("cannot read the VM's mailbox"),
            Self::Dialects => Some("dialects that guests asked for before"),
            Self::Snapshot => None,
            Self::Registration => Some("register the VM again, or remove the file"),
        }
    }
}

impl Moment {
    pub(crate) const ALL: [Self; 3] = [Self::BeforeStart, Self::Running, Self::BeforeTakeover];
}

/// Damages a file: empties it, cuts it, or fills it with other bytes of the same number.
fn damage(path: &PathBuf, how: u8) -> Result<()> {
    let bytes = fs::read(path).with_context(|| path.display().to_string())?;
    let damaged = match how % 3 {
        0 => Vec::new(),
        1 => bytes[..bytes.len() / 2].to_vec(),
        _ => vec![0xa5; bytes.len()],
    };
    // In place, so that its mode stays.
    fs::write(path, damaged)?;
    Ok(())
}

/// Damages a file at a moment, in each way. The next agent starts, says so, and serves both guests; what the other guest
/// wrote is there; what is written afterwards is kept.
pub(crate) fn damage_at(node: &Node, file: Damage, moment: Moment) -> Result<()> {
    let mut agent = node.agent(&[])?;
    ensure!(node.api("PUT", "/registered", &Identity::of(9).record(1), PATIENCE)? < 300, "registered");
    for how in 0..3 {
        for guest in [0, 1] {
            ensure!(node.put_attribute(guest, "key", &format!("{guest}-{how}"))? == 200, "an attribute");
        }
        // Each file is there once what it holds has been written.
        let path = match (file, moment) {
            (Damage::TokenKeys | Damage::Registration, _) | (Damage::Mailbox, _) => {
                eventually(PATIENCE, || {
                    let path = file.path(node)?;
                    ensure!(fs::metadata(&path)?.len() > 0);
                    ensure!(
                        on_disk(node, 1, &format!("{}-{how}", 1))?,
                        "the other guest's write is not on disk"
                    );
                    Ok(path)
                })?
            }
            // These are written at the end of an agent at the latest.
            _ => {
                ensure!(agent.stop()?.success(), "an agent stops");
                agent = node.agent(&[])?;
                file.path(node)?
            }
        };
        agent = match moment {
            Moment::BeforeStart => {
                ensure!(agent.stop()?.success(), "an agent stops");
                damage(&path, how)?;
                node.agent(&[])?
            }
            Moment::Running => {
                damage(&path, how)?;
                node.assert_own(0)?;
                node.assert_own(1)?;
                agent.kill()?;
                node.agent(&[])?
            }
            Moment::BeforeTakeover => {
                damage(&path, how)?;
                let next = node.agent(&["--takeover"])?;
                agent.ended(Duration::from_secs(60))?;
                next
            }
        };
        if let Some(said) = file.is_named_by() {
            ensure!(agent.eventually_logs(said), "no `{said}` in its log:\n{}", agent.log());
        }
        eventually(PATIENCE, || [0, 1].into_iter().try_for_each(|guest| node.assert_own(guest)))?;
        let (status, found) = node.attribute(1, "key")?;
        ensure!((status, found.as_str()) == (200, &*format!("1-{how}")), "the other guest: {status} {found}");
        ensure!(node.put_attribute(0, "after", "it works")? == 200, "a write afterwards");
        ensure!(node.attribute(0, "after")?.1 == "it works", "a read afterwards");
        ensure!(node.attribute(1, "after")?.0 == 404, "the other guest has it too");
        ensure!(
            node.api("PUT", "/registered", &Identity::of(9).record(1), PATIENCE)? < 300,
            "registered again"
        );
    }
    Ok(())
}

fn on_disk(node: &Node, guest: usize, value: &str) -> Result<bool> {
    use base64::Engine as _;
    let text = fs::read_to_string(node.mailbox(guest)?)?;
    Ok(text.contains(&base64::engine::general_purpose::STANDARD.encode(value)))
}
