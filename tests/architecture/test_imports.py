"""No two files import each other, in any package."""

from itertools import combinations

import grimp

PACKAGES = ("bridge", "bridge_cli", "bridge_environments", "bridge_patches")


def test_no_two_files_import_each_other() -> None:
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    imported = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    assert len(imported) > 100
    pairs = [(one, other) for one, other in combinations(sorted(imported), 2) if other in imported[one]]
    assert [(one, other) for one, other in pairs if one in imported[other]] == []
