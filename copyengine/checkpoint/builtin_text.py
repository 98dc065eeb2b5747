"""The text that the built-in model's tokenizer is trained on. Written for this purpose."""

TEXT = '''
The harbour wakes before the town does. At four in the morning the first boats push off from the quay, their lamps
swaying over black water, and the gulls begin to complain. An old man named Tobias counts them out, as he has counted
them every morning for thirty years, and writes the number in a ledger bound with green cloth. Nobody asked him to do
this. Nobody reads the ledger. When a boat is late he knows it first, and that is reason enough.

A library is a machine for finding things. The shelves are slow memory: large, cheap and far away. The desk in front
of the reader is fast memory: small, dear and close at hand. A good librarian learns which books a reader will ask for
next and carries them to the desk before the question is spoken. A poor librarian carries every book in the building,
one cart after another, and the reader waits for all of them in order to read a single page. Most of the art lies in
knowing what not to carry.

How does bread rise? Yeast eats the sugar in the flour and breathes out gas; the dough, stretched into thin sheets by
kneading, holds the bubbles in. Warm dough rises quickly and tastes of little. Cold dough rises slowly, overnight, and
tastes of much more. Mix 500 grams of flour with 350 grams of water, 10 grams of salt and 2 grams of yeast. Wait
twelve hours. Fold it twice, shape it, wait again, and bake it at 240 degrees until the crust is dark brown. Let it
cool before you cut it, although you will not want to.

Question: what is the capital of a country? Answer: the city where its government sits, which is not always the
largest city, nor the oldest, nor the one that visitors remember. Question: why is the sky blue? Answer: air scatters
short waves of light more than long ones, so that blue comes to the eye from every direction while red passes straight
through. Question: how far away is the moon? Answer: about 384,000 kilometres, or a little more than one second for
light.

The computer does exactly what it was told, which is seldom what was meant. Programs grow the way gardens grow:
somebody plants a hedge to keep the wind out, somebody else forgets why it stands there, and ten years later a path
bends around it. To remove the hedge you must first understand the wind. Write down why a thing is there. Give each
thing one name and use that name everywhere. Measure before you change anything, change one thing at a time, and
measure again afterwards.

def greatest(numbers):
    """Return the greatest of the numbers."""
    best = numbers[0]
    for number in numbers[1:]:
        if number > best:
            best = number
    return best

In the mountains above the village there was a small weather station, three wooden rooms with a tower for the
instruments. Two women worked there in turns, one week each, and they met only on Mondays when the cable car brought
one up and took the other down. They left letters for each other on the kitchen table. At first the letters were about
pressure and temperature, the broken window, the price of coffee. By the second winter they were about everything
else. "The fox came back," wrote the first. "I think she remembers me." And the other answered: "She remembers the
cheese."

Water boils at 100 degrees at the level of the sea, and at about 93 degrees in a town two thousand metres above it.
Ice is lighter than water, so lakes freeze from above and fish live through the winter underneath. Salt lowers the
freezing point; sugar does the same, though less. A cubic metre of water weighs a thousand kilograms, a cubic metre of
air a little more than one.

Please write a short poem about the autumn. The leaves let go without regret, / the garden sleeps, the stones are wet,
/ a kettle sings, the lamps are lit, / and near the stove the children sit. Thank you, that was lovely. You are
welcome! Would you like another one, perhaps about the spring, or about the sea? No, thank you, but could you explain
how a clock works? Certainly. A weight or a spring pushes, a wheel wants to turn, and a little anchor lets one tooth
go by at every swing of the pendulum. The hands only count the teeth.

There were seven merchants in the old market, and each of them sold something the others did not: copper pots, saffron
and pepper, blue glass, wool from the northern islands, maps, medicines, and songs. The seller of songs was the
poorest and the most visited. For a coin he would sing whatever you asked for, and for two coins he would teach it to
you. "A pot can be stolen," he used to say, "and glass will break, but nobody ever lost a song on the road." When the
market burned, he was the only merchant who carried away all of his goods.

To travel from the northern station to the southern one, take the train that leaves at 7:45, change at the junction
after forty minutes, and sit on the left side for the view of the river. The journey takes two hours and costs 18
crowns; children under six travel free. On Sundays there is no train before nine. If the bridge is closed, a bus runs
between the villages, and the driver, who is also the mayor, will tell you its history whether you ask or not.

Experts are consulted one by one. A difficult question goes to the few who know about it, and the others keep on
sleeping; an easy question goes to whoever is awake. The manager at the door, called a router, looks at every word
that comes in and decides which eight of the sixty-four should hear it. Their answers are weighed and added together.
Nobody in the building knows the whole language, and yet the building speaks.

The physician listened, first to the heart and then to the man. "You work too much and you walk too little," she said,
"and you already knew this before you came." He laughed. Outside, the rain had stopped, and the street smelled of dust
and lime trees. He decided to walk home. It took an hour and a half, past the theatre, the university, the brewery and
the long brick wall of the railway yard, where somebody had painted a whale so large that its tail came round the
corner.

Some numbers: one, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve, twenty, thirty, fifty,
hundred, thousand, million. Some days: Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday. Some months:
January, February, March, April, May, June, July, August, September, October, November, December. Some colours: red,
orange, yellow, green, blue, violet, brown, black, white, grey. First, second, third, last. Always, often, sometimes,
rarely, never. Before, during, after. Because, although, however, therefore, unless, until, whether, while.

{"name": "example", "version": 1, "items": [10, 20, 30], "nested": {"ready": true, "error": null}}

When the lighthouse was built, the keeper was given three rules. Keep the lamp burning. Keep the glass clean. Keep the
book. The first two he understood at once, for ships depended on them. The third he understood only when he was old,
turning the pages back to storms that he had forgotten, to names of vessels that no longer sailed, to a line in his
own young handwriting: "Clear night. Everything visible. Nothing happened." It was, he thought, the best day in the
book.
'''
