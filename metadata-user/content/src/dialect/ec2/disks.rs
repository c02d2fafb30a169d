//! `block-device-mapping/`: the names that the guest's kernel gives the record's disks.

use std::collections::BTreeMap;

use super::tree::Tree;
use crate::record::Record;
use crate::record::vm::Disk;

/// Root disk of a VM whose record lists none.
const ROOT: &str = "/dev/vda";

/// Adds `ami` and `root` for the first disk, `ebs1`, `ebs2`, … for the others. Adds no `ephemeral0`, because cloud-init
/// would mount it.
pub(super) fn render(record: &Record, tree: &mut Tree<'_, '_>) {
    let mut names = names(&record.disks).into_iter();
    let root = names.next().unwrap_or_else(|| ROOT.to_owned());
    tree.text("/latest/meta-data/block-device-mapping/ami", root.as_str());
    tree.text("/latest/meta-data/block-device-mapping/root", root);
    for (n, name) in names.enumerate() {
        tree.text(format!("/latest/meta-data/block-device-mapping/ebs{}", n + 1), name);
    }
}

/// Returns the device names of disks, assuming that the kernel finds them in the record's order.
fn names(disks: &[Disk]) -> Vec<String> {
    let mut found = BTreeMap::<&str, usize>::new();
    let disks = disks.iter().filter(|disk| disk.kind.as_str() == "disk");
    disks
        .map(|disk| {
            let prefix = match disk.bus.as_str() {
                "scsi" | "sata" | "ide" | "usb" => "sd",
                "xen" => "xvd",
                "nvme" => "nvme",
                _ => "vd",
            };
            let number = found.entry(prefix).or_default();
            *number += 1;
            match prefix {
                "nvme" => format!("/dev/nvme{}n1", *number - 1),
                _ => format!("/dev/{prefix}{}", letters(*number)),
            }
        })
        .collect()
}

/// Returns the letters of a number: 1 is `a`, 26 `z`, 27 `aa`.
fn letters(mut number: usize) -> String {
    let mut letters = Vec::new();
    while number > 0 {
        letters.push(b'a' + u8::try_from((number - 1) % 26).unwrap_or(0));
        number = (number - 1) / 26;
    }
    letters.iter().rev().map(|letter| char::from(*letter)).collect()
}

#[cfg(test)]
mod tests {
    use super::letters;

    #[test]
    fn disks_beyond_the_alphabet_have_two_letters() {
        let named = [(1, "a"), (26, "z"), (27, "aa"), (52, "az"), (53, "ba"), (702, "zz"), (703, "aaa")];
        for (number, name) in named {
            assert_eq!(letters(number), name, "{number}");
        }
    }
}
